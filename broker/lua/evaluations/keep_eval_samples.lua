-- KEYS: EVAL_SAMPLES
-- ARGV: entries kept, then one body each. Keeps readable samples of evaluations before the trainer writes them to the
-- run's folder; rejected if memory is full.
for i = 2, #ARGV do redis.call('XADD', EVAL_SAMPLES, 'MAXLEN', ARGV[1], '*', 'j', ARGV[i]) end
return 'ok'
