#!lua flags=allow-oom
-- KEYS: LEADER_TERM ROLL ROLL_CHANGES
-- ARGV: term, payload, communicator that the trainer holds. Closes the roll once all known members have answered, or
-- when its time is over; before that it returns the milliseconds left. Then: communicator, size, backend; the trainer
-- has rank 0, the members follow in the order of their names. A communicator is reused if exactly the members of the
-- roll hold it. A member that did not answer is not waited for before it answers again. Size 1: no member came. A
-- repeat returns the same.
local no = rejected(ARGV[1])
if no then return no end
local f = redis.call('HMGET', ROLL, 'payload', 'open', 'ends', 'backend', 'communicator', 'roll')
if f[1] ~= ARGV[2] then return {0, 1, ''} end
if f[2] ~= '1' then
  local _, others = string.gsub(f[6] or '', '%S+', '')
  return {tonumber(f[5]) or 0, others + 1, f[4]}
end
local now = redis.call('TIME')
local moment = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local left = tonumber(f[3]) - moment
local holds, known, late, fields = {}, 0, {}, redis.call('HGETALL', ROLL)
for i = 1, #fields, 2 do
  local id = string.match(fields[i], '^answer:(.+)$')
  if id then holds[id] = fields[i + 1] end
end
for i = 1, #fields, 2 do
  local id = string.match(fields[i], '^member:(.+)$')
  if id then
    known = known + 1
    if not holds[id] then late[#late + 1] = fields[i] end
  end
end
if left > 0 and (known == 0 or #late > 0) then return left end
redis.call('HSET', ROLL, 'open', '0')
for _, field in ipairs(late) do redis.call('HDEL', ROLL, field) end
local ids, same = {}, f[5] == ARGV[3]
for id, held in pairs(holds) do
  ids[#ids + 1] = id
  same = same and held == ARGV[3]
  redis.call('HSET', ROLL, 'member:' .. id, '1')
end
table.sort(ids)
local roll, communicator = table.concat(ids, ' '), f[5]
if not same or roll ~= f[6] then
  -- No number is given twice, even by a wiped broker, because processes identify communicators by it.
  communicator = math.max((tonumber(f[5]) or 0) + 1, moment)
  redis.call('HSET', ROLL, 'roll', roll, 'communicator', communicator)
  for i = 1, #fields, 2 do
    if string.match(fields[i], '^note:') then redis.call('HDEL', ROLL, fields[i]) end
  end
end
roll_changed('closed')
return {tonumber(communicator), #ids + 1, f[4]}
