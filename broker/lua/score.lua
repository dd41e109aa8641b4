-- ARGV: trajectory entry, task id, sample, score body, reward ('' when it failed), dead letter ('' when none).
-- Publishes the score and acknowledges the trajectory at once, once. The body stays until it is trained.
local entry, task = ARGV[1], ARGV[2]
if #redis.call('XPENDING', TRAJECTORIES, REWARD, entry, entry, 1) == 0 then return 'dup' end
if ARGV[6] ~= '' then redis.call('XADD', DEAD, '*', 'b', ARGV[6]) end
local fields = redis.call('HMGET', GROUPS, task .. ':kind', task .. ':n')
local known = fields[1] and redis.call('HGET', SAMPLES, task .. ':' .. ARGV[3]) == entry
if known and fields[1] == 'train' then
  redis.call('XADD', SCORED, '*', 't', task, 's', ARGV[3], 'n', fields[2], 'e', entry, 'b', ARGV[4])
  redis.call('XACK', TRAJECTORIES, REWARD, entry)
  return 'ok'
end
if known then
  eval_outcome(task, ARGV[5] ~= '' and ARGV[5] or nil)
end
redis.call('XACK', TRAJECTORIES, REWARD, entry)
redis.call('XDEL', TRAJECTORIES, entry)
if not known then return 'closed' end
redis.call('HSET', SAMPLES, task .. ':' .. ARGV[3], '-')
if redis.call('HINCRBY', GROUPS, task .. ':open', -1) <= 0 then forget(task) end
return 'ok'
