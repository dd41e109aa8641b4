-- KEYS: SLOTS COUNTS REDO FAILED DEAD CHANGES
-- ARGV: dead letter's entry, task id. A group that failed is admitted again, first of all; its letters may go.
local task = ARGV[2]
if redis.call('ZSCORE', SLOTS, task) then return 'active' end
if redis.call('ZREM', FAILED, task) == 0 then return 'trained' end
redis.call('ZADD', REDO, task, task)
redis.call('HINCRBY', COUNTS, 'admitted', -1)
redis.call('HINCRBY', COUNTS, 'failed:requeued', -1)
redis.call('XDEL', DEAD, ARGV[1])
changed('requeue')
return 'ok'
