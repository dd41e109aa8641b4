#!lua flags=allow-oom
-- KEYS: SERVICES
-- ARGV: service, heartbeat. A sign of life is sent also when memory is full: leases hang on its thread.
redis.call('HSET', SERVICES, ARGV[1], ARGV[2])
return 'ok'
