#!lua flags=allow-oom
-- ARGV: task id, 'dropped' or 'failed', reason, epoch ('' from a service that is no trainer), then scored entries.
-- A group ends without being trained: its slot returns, its data goes. Once.
local task = ARGV[1]
if ARGV[4] ~= '' and fenced(ARGV[4]) then return 'fenced' end
if redis.call('ZREM', SLOTS, task) == 0 then return 'closed' end
redis.call('HINCRBY', COUNTS, ARGV[2] .. ':' .. ARGV[3], 1)
redis.call('HINCRBY', COUNTS, 'samples_' .. ARGV[2], forget(task))
for i = 5, #ARGV do
  redis.call('XACK', SCORED, TRAINER, ARGV[i])
  redis.call('XDEL', SCORED, ARGV[i])
end
changed('close')
return 'ok'
