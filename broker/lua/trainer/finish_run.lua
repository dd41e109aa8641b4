#!lua flags=allow-oom
-- KEYS: CTL LEADER_TERM CHANGES
-- ARGV: term. Marks the run as finished, all steps done: services that see it end.
local no = refused(ARGV[1])
if no then return no end
redis.call('HSET', CTL, 'state', 'finished')
changed('run_state')
return 'ok'
