#!lua flags=allow-oom
-- KEYS: LEADER_TERM CHUNKS
-- ARGV: term, field, bytes. Stores a chunk of a weight version; works if memory is full, like its manifest.
local no = rejected(ARGV[1])
if no then return no end
redis.call('HSET', CHUNKS, ARGV[2], ARGV[3])
return 'ok'
