#!lua flags=allow-oom
-- KEYS: CTL LEADER_TERM RUN_CONTROL CHANGES
-- ARGV: term. Marks the run as finished, with all steps done. Services find the number of its steps among the orders,
-- which all of them may read, and end.
local no = rejected(ARGV[1])
if no then return no end
redis.call('HSET', CTL, 'state', 'finished')
redis.call('HSET', RUN_CONTROL, 'finished', redis.call('HGET', CTL, 'step') or '0')
changed('run_state')
return 'ok'
