-- KEYS: QUESTIONS
-- ARGV: none. Takes the oldest question that people asked the policy, for one generator alone; false without one.
return redis.call('LPOP', QUESTIONS)
