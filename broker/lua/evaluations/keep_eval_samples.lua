-- KEYS: EVAL_SAMPLES
-- ARGV: entries kept, bytes kept, then one body each. Keeps readable samples of evaluations before the trainer writes
-- them to the run's folder, the newest within both bounds; rejected if memory is full.
for i = 3, #ARGV do redis.call('XADD', EVAL_SAMPLES, 'MAXLEN', ARGV[1], '*', 'j', ARGV[i]) end
trim_bytes(EVAL_SAMPLES, ARGV[2])
return 'ok'
