#!lua flags=allow-oom
-- KEYS: CTL CHANGES REFUSALS
-- ARGV: the run's identity, its folder, this host. Says that the run's services are being started, before any of them
-- is. Another run of this name stays as it is; the answer is its identity, folder, host, and when it began.
if redis.call('TYPE', CTL).ok ~= 'hash' and redis.call('EXISTS', CTL) == 1 then return 'ok' end
if other_run(ARGV[1]) then return owner() end
own_run(ARGV[1], ARGV[2], ARGV[3])
-- How the attempt before this one ended is not how this one stands.
redis.call('HSET', CTL, 'state', 'starting')
redis.call('HDEL', CTL, 'cause')
redis.call('DEL', REFUSALS)
changed('run_state')
return 'ok'
