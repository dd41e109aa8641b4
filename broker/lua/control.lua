#!lua flags=allow-oom
-- KEYS: CTL CHANGES
-- ARGV: field, value. Control state that people change and services consult: paused.
redis.call('HSET', CTL, ARGV[1], ARGV[2])
changed('control')
return 'ok'
