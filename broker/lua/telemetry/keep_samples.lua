#!lua flags=allow-oom
-- KEYS: RECENT
-- ARGV: step, entries kept, then task id, sample, score body and trajectory body of each. Keeps a few trained samples
-- for users to read after they left the pipeline; their number and size are bounded.
for i = 3, #ARGV, 4 do
  redis.call('XADD', RECENT, 'MAXLEN', ARGV[2], '*', 'p', ARGV[1], 't', ARGV[i], 's', ARGV[i + 1], 'r', ARGV[i + 2], 'b', ARGV[i + 3])
end
return 'ok'
