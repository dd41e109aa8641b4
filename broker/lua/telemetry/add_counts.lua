#!lua flags=allow-oom
-- KEYS: COUNTERS
-- ARGV: pairs of name and amount. Adds to counts of a run's faults, which are for people; nothing depends on them.
for i = 1, #ARGV, 2 do redis.call('HINCRBYFLOAT', COUNTERS, ARGV[i], ARGV[i + 1]) end
return 'ok'
