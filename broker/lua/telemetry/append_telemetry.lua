#!lua flags=allow-oom
-- KEYS: EVENTS METRICS
-- ARGV: 'events' or 'metrics', field, body, entries kept. Appends a line of telemetry, even if memory is full.
local stream = ({events = EVENTS, metrics = METRICS})[ARGV[1]]
return redis.call('XADD', stream, 'MAXLEN', '~', ARGV[4], '*', ARGV[2], ARGV[3])
