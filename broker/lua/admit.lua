-- ARGV: expected cursor (= task id), task body, samples. Charges one slot and queues the task, or says why not.
-- Idempotent: a repeat finds the cursor moved on.
local ctl = redis.call('HMGET', CTL, 'paused', 'slots', 'total', 'trained', 'cursor', 'version')
if ctl[1] == '1' then return {'paused', ctl[5]} end
if ctl[5] ~= ARGV[1] then return {'moved', ctl[5]} end
local active = redis.call('ZCARD', SLOTS)
if tonumber(ctl[4]) + active >= tonumber(ctl[3]) then return {'done', ctl[5]} end
if active >= tonumber(ctl[2]) then return {'full', ctl[5]} end
local task = ARGV[1]
local entry = redis.call('XADD', TASKS, '*', 't', task, 'v', ctl[6], 'b', ARGV[2])
redis.call('HSET', GROUPS, task .. ':n', ARGV[3], task .. ':kind', 'train', task .. ':entry', entry, task .. ':left', ARGV[3])
redis.call('ZADD', SLOTS, redis.call('HINCRBY', CTL, 'seq', 1), task)
redis.call('HINCRBY', COUNTS, 'admitted', 1)
return {'ok', tostring(redis.call('HINCRBY', CTL, 'cursor', 1))}
