#!lua flags=allow-oom
-- KEYS: CTL CHANGES
-- ARGV: field, value. Sets state and cause of a run that ended before it was done, as its supervisor saw it.
redis.call('HSET', CTL, ARGV[1], ARGV[2])
changed('run_state')
return 'ok'
