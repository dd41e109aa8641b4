#!lua flags=allow-oom
-- KEYS: CTL EPOCH CHANGES
-- ARGV: epoch. All steps are done: services that see it end.
local no = refused(ARGV[1])
if no then return no end
redis.call('HSET', CTL, 'state', 'finished')
changed('control')
return 'ok'
