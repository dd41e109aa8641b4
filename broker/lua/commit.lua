#!lua flags=allow-oom
-- ARGV: epoch, step, number of groups, task ids, then scored entries. A durable checkpoint covers this step.
if fenced(ARGV[1]) then return 'fenced' end
local groups = tonumber(ARGV[3])
for i = 4, 3 + groups do forget(ARGV[i]) end
for i = 4 + groups, #ARGV do
  redis.call('XACK', SCORED, TRAINER, ARGV[i])
  redis.call('XDEL', SCORED, ARGV[i])
end
redis.call('HDEL', JOURNAL, ARGV[2])
return 'ok'
