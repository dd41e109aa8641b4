#!lua flags=allow-oom
-- KEYS: COUNTERS
-- ARGV: name and amount, again and again. Counts what is worth knowing of a run's mishaps; nothing depends on it.
for i = 1, #ARGV, 2 do redis.call('HINCRBYFLOAT', COUNTERS, ARGV[i], ARGV[i + 1]) end
return 'ok'
