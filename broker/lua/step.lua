#!lua flags=allow-oom
-- ARGV: epoch, step done, new version, samples, then task ids. Frees the slots of what was trained. Once.
if fenced(ARGV[1]) then return 'fenced' end
if tonumber(redis.call('HGET', CTL, 'step')) >= tonumber(ARGV[2]) then return 'repeat' end
local groups = 0
for i = 5, #ARGV do groups = groups + redis.call('ZREM', SLOTS, ARGV[i]) end
redis.call('HINCRBY', COUNTS, 'trained', groups)
redis.call('HINCRBY', COUNTS, 'samples_trained', ARGV[4])
redis.call('HINCRBY', CTL, 'trained', groups)
redis.call('HSET', CTL, 'step', ARGV[2], 'version', ARGV[3])
changed('step')
return 'ok'
