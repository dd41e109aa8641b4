#!lua flags=allow-oom
-- KEYS: ROLL ROLL_ANSWERS
-- ARGV: member, payload, communicator that it holds, backends that it has. Answers the roll call for this payload; a
-- member repeats it to poll, and leaves with an empty payload. Returns nil to a member that is not and will not be on
-- the roll, the milliseconds until an open roll closes, or, of a closed one: communicator, rank, size, backend. A
-- member that comes too late is known afterwards, so that the next roll waits for it.
local member, payload = ARGV[1], ARGV[2]
if payload == '' then
  local known = redis.call('HDEL', ROLL, 'answer:' .. member, 'member:' .. member) > 0
  if known then redis.call('XADD', ROLL_ANSWERS, 'MAXLEN', '16', '*', 'w', member) end
  return false
end
local f = redis.call('HMGET', ROLL, 'payload', 'open', 'ends', 'backend', 'communicator', 'roll', 'answer:' .. member)
local now = redis.call('TIME')
local left = (tonumber(f[3]) or 0) - tonumber(now[1]) * 1000 - math.floor(tonumber(now[2]) / 1000)
local able = f[4] and string.find(' ' .. ARGV[4] .. ' ', ' ' .. f[4] .. ' ', 1, true)
if able and f[1] == payload and f[2] == '1' and (left > 0 or f[7]) then
  redis.call('HSET', ROLL, 'answer:' .. member, ARGV[3])
  if f[7] ~= ARGV[3] then redis.call('XADD', ROLL_ANSWERS, 'MAXLEN', '16', '*', 'w', member) end
  return math.max(left, 0)
end
if able and f[1] == payload and f[7] then
  local rank, size = nil, 1
  for id in string.gmatch(f[6] or '', '%S+') do
    if id == member then rank = size end
    size = size + 1
  end
  if rank then return {tonumber(f[5]), rank, size, f[4]} end
end
if ARGV[4] ~= '' then redis.call('HSET', ROLL, 'member:' .. member, '1') end
return false
