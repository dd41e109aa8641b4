-- KEYS: EVAL_SAMPLES
-- ARGV: entries kept, then one body each. Keeps scored samples of evaluations, as people read them, until the trainer has
-- written them to the run's folder; a memory limit refuses them.
for i = 2, #ARGV do redis.call('XADD', EVAL_SAMPLES, 'MAXLEN', ARGV[1], '*', 'j', ARGV[i]) end
return 'ok'
