#!lua flags=allow-oom
-- KEYS: LEADER_TERM ROLL
-- ARGV: term, payload, backend, milliseconds. Opens a roll for all that want this payload, and ends the roll before. It
-- works if memory is full, as all scripts for weights do.
local no = rejected(ARGV[1])
if no then return no end
local now = redis.call('TIME')
local ends = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000) + tonumber(ARGV[4])
redis.call('HSET', ROLL, 'payload', ARGV[2], 'backend', ARGV[3], 'ends', ends, 'open', '1')
for _, field in ipairs(redis.call('HKEYS', ROLL)) do
  if string.match(field, '^answer:') then redis.call('HDEL', ROLL, field) end
end
return 'ok'
