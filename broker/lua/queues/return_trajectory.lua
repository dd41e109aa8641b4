#!lua flags=allow-oom
-- KEYS: SAMPLES TRAJECTORIES
-- ARGV: trajectory entry, task id, sample, consumer. Returns a trajectory of a reward service for another one to take
-- at once, as a new entry, because others get what a consumer holds only after its lease.
local entry, field = ARGV[1], ARGV[2] .. ':' .. ARGV[3]
local place = redis.call('HGET', SAMPLES, field) or '-'
if place ~= entry .. '/' .. body_of(place) then return 'closed' end
if not is_pending(TRAJECTORIES, REWARD, entry, ARGV[4]) then return 'closed' end
local old = redis.call('XRANGE', TRAJECTORIES, entry, entry)
if #old == 0 then return 'closed' end
redis.call('HSET', SAMPLES, field, redis.call('XADD', TRAJECTORIES, '*', unpack(old[1][2])) .. '/' .. body_of(place))
remove(TRAJECTORIES, REWARD, {entry})
return 'ok'
