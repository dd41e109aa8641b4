-- ARGV: epoch, step, record. Fixes what a step trains on, before it does. The first record of a step stands.
if fenced(ARGV[1]) then return 'fenced' end
redis.call('HSETNX', JOURNAL, ARGV[2], ARGV[3])
return 'ok'
