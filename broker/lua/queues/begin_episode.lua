-- KEYS: LIVE LIVE_SEATS LIVE_BEGUN GROUPS
-- ARGV: tenant, the most records of episodes that are kept. Gives a new conversation the sample that was offered first.
-- Returns id and record; false if no generator offers one. The records of the oldest conversations are deleted.
local run = redis.call('HGET', GROUPS, 'run') or ''
local record, id
repeat
  id = redis.call('ZPOPMIN', LIVE_SEATS)[1]
  if not id then return false end
  local known = redis.call('HGET', LIVE, id)
  record = known and cmsgpack.unpack(known)
  -- The group of a sample may have ended before a user came. One that was offered to a broker without its data is offered
  -- again under another id.
  local over = record and redis.call('HEXISTS', GROUPS, string.match(record.seat, '^%d*') .. ':n') == 0
  if record and (over or record.run ~= run) then
    redis.call('HDEL', LIVE, id, 'seat:' .. record.seat)
    record = nil
  end
until record
local now = tonumber(redis.call('TIME')[1])
record.begun, record.tenant = now, ARGV[1]
local packed = cmsgpack.pack(record)
redis.call('HSET', LIVE, id, packed)
redis.call('ZADD', LIVE_BEGUN, now, id)
while redis.call('ZCARD', LIVE_BEGUN) > tonumber(ARGV[2]) do
  local old = redis.call('ZPOPMIN', LIVE_BEGUN)[1]
  local known = redis.call('HGET', LIVE, old)
  if known then redis.call('HDEL', LIVE, old, 'seat:' .. cmsgpack.unpack(known).seat) end
end
return {id, packed}
