#!lua flags=allow-oom
-- KEYS: LIVE
-- ARGV: id, tenant ('*': any), reward ('': end the episode without one), seconds after its begin until which it may come.
-- Of a reward and an end, the first one counts. Returns what holds now, and the reward that counts: ok, same (there was
-- one before), ended, late, or unknown.
local known = redis.call('HGET', LIVE, ARGV[1])
local record = known and cmsgpack.unpack(known)
if not record or record.begun == 0 or (ARGV[2] ~= '*' and record.tenant ~= ARGV[2]) then return {'unknown', ''} end
if record.reward then return {'same', record.reward} end
if record.ended then return {'ended', ''} end
if ARGV[3] == '' then
  record.ended = true
elseif tonumber(redis.call('TIME')[1]) > record.begun + tonumber(ARGV[4]) then
  return {'late', ''}
else
  record.reward = ARGV[3]
end
redis.call('HSET', LIVE, ARGV[1], cmsgpack.pack(record))
return {record.reward and 'ok' or 'ended', ARGV[3]}
