-- KEYS: ANSWERS
-- ARGV: the answer, most answers and bytes that are kept. Publishes the answer to a user who is waiting for it.
redis.call('XADD', ANSWERS, 'MAXLEN', ARGV[2], '*', 'b', ARGV[1])
trim_bytes(ANSWERS, ARGV[3])
return 'ok'
