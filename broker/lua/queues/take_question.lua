-- KEYS: QUESTIONS
-- ARGV: none. Takes the oldest question of a user to the policy, for one generator alone; false if there is none.
return redis.call('LPOP', QUESTIONS)
