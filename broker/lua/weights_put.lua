#!lua flags=allow-oom
-- KEYS: CHUNKS
-- ARGV: field, bytes. One chunk of a weight version; passes when memory is full, like its manifest.
redis.call('HSET', CHUNKS, ARGV[1], ARGV[2])
return 'ok'
