-- KEYS: ANSWERS
-- ARGV: the answer, most answers that are kept. Answers are for people who wait for them now, and few are kept.
redis.call('XADD', ANSWERS, 'MAXLEN', ARGV[2], '*', 'b', ARGV[1])
return 'ok'
