#!lua flags=allow-oom
-- KEYS: QUESTIONS RUN_CONTROL CHANGES ORDERS
-- ARGV: the question, most questions that may wait. Queues a user's question to the current policy, and wakes
-- generators as an order does. Returns 'full' if too many are waiting. A repeat has no effect while the question waits.
if redis.call('LPOS', QUESTIONS, ARGV[1]) then return 'ok' end
if redis.call('LLEN', QUESTIONS) >= tonumber(ARGV[2]) then return 'full' end
redis.call('RPUSH', QUESTIONS, ARGV[1])
redis.call('HINCRBY', RUN_CONTROL, 'asked', 1)
ordered('question')
return 'ok'
