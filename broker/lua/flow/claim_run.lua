#!lua flags=allow-oom
-- KEYS: CTL CHANGES REJECTIONS
-- ARGV: the run's identity, its folder, this host. Takes the name of the run before any of its services starts. If
-- another run has the name, nothing happens, and its identity, folder, host and start are returned.
if redis.call('TYPE', CTL).ok ~= 'hash' and redis.call('EXISTS', CTL) == 1 then return 'ok' end
if other_run(ARGV[1]) then return owner() end
own_run(ARGV[1], ARGV[2], ARGV[3])
-- The end of the attempt before is not the state of this one.
redis.call('HSET', CTL, 'state', 'starting')
redis.call('HDEL', CTL, 'cause')
redis.call('DEL', REJECTIONS)
changed('run_state')
return 'ok'
