#!lua flags=allow-oom
-- KEYS: LEADER_TERM CHUNKS
-- ARGV: term, field, bytes. One chunk of a weight version; passes when memory is full, like its manifest.
local no = refused(ARGV[1])
if no then return no end
redis.call('HSET', CHUNKS, ARGV[2], ARGV[3])
return 'ok'
