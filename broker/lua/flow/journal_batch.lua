#!lua flags=allow-oom
-- KEYS: CTL LEADER_TERM JOURNAL
-- ARGV: term, step, record. Records the batch of a step, before the step. The first record of a step stays.
local no = rejected(ARGV[1])
if no then return no end
-- Steps before it are missing: the broker lost recent writes.
if tonumber(redis.call('HGET', CTL, 'step') or -1) < tonumber(ARGV[2]) then return 'lost' end
redis.call('HSETNX', JOURNAL, ARGV[2], ARGV[3])
return 'ok'
