#!lua flags=allow-oom
-- KEYS: QUESTIONS RUN_CONTROL CHANGES ORDERS
-- ARGV: the question, most questions that may wait. Asks the present policy something, for people: generators are woken
-- as by an order. Answers 'full' when too many wait.
if redis.call('LLEN', QUESTIONS) >= tonumber(ARGV[2]) then return 'full' end
redis.call('RPUSH', QUESTIONS, ARGV[1])
redis.call('HINCRBY', RUN_CONTROL, 'asked', 1)
ordered('question')
return 'ok'
