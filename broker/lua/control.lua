#!lua flags=allow-oom
-- ARGV: field, value. Control state that services consult: paused, state, slots, total.
redis.call('HSET', CTL, ARGV[1], ARGV[2])
changed('control')
return 'ok'
