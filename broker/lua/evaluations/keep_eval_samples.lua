-- KEYS: EVAL_SAMPLES
-- ARGV: entries kept, bytes kept, then one body each. Keeps readable samples of evaluations before the trainer writes
-- them to the run's folder, the newest within both bounds; rejected if memory is full.
for i = 3, #ARGV do redis.call('XADD', EVAL_SAMPLES, 'MAXLEN', ARGV[1], '*', 'j', ARGV[i]) end
local left = redis.call('XLEN', EVAL_SAMPLES)
while left > 1 and redis.call('MEMORY', 'USAGE', EVAL_SAMPLES, 'SAMPLES', '0') > tonumber(ARGV[2]) do
  left = left - math.ceil(left / 16)
  redis.call('XTRIM', EVAL_SAMPLES, 'MAXLEN', left)
end
return 'ok'
