#!lua flags=allow-oom
-- KEYS: EPOCH JOURNAL
-- ARGV: epoch, step, record. Fixes what a step trains on, before it does. The first record of a step stands.
local no = refused(ARGV[1])
if no then return no end
redis.call('HSETNX', JOURNAL, ARGV[2], ARGV[3])
return 'ok'
