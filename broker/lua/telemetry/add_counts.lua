#!lua flags=allow-oom
-- KEYS: COUNTERS
-- ARGV: pairs of name and amount. Adds to the counters of a run's faults, on which nothing depends.
for i = 1, #ARGV, 2 do redis.call('HINCRBYFLOAT', COUNTERS, ARGV[i], ARGV[i + 1]) end
return 'ok'
