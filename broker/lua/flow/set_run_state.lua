#!lua flags=allow-oom
-- KEYS: CTL CHANGES
-- ARGV: field, value. Sets how a run ended before it was done, as its supervisor saw it: state, cause.
redis.call('HSET', CTL, ARGV[1], ARGV[2])
changed('run_state')
return 'ok'
