#!lua flags=allow-oom
-- KEYS: EVENTS METRICS
-- ARGV: 'events' or 'metrics', field, body, entries kept. What people look at never waits for memory.
local stream = ({events = EVENTS, metrics = METRICS})[ARGV[1]]
return redis.call('XADD', stream, 'MAXLEN', '~', ARGV[4], '*', ARGV[2], ARGV[3])
