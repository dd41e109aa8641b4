#!lua flags=allow-oom
-- KEYS: SERVICES COUNTS
-- ARGV: service, heartbeat, seconds of silence after which a service is deleted; for the first heartbeat of a process
-- that must be the only one of its name, the heartbeat that a dead process left ('' for none). Stores a heartbeat, even
-- if memory is full, because its thread renews leases. A first one is not stored if another process has the name: then
-- that process's heartbeat is returned. A new service deletes those that were silent for too long.
-- The device seconds since the name's last heartbeat are added to the counts, as device:ROLE:USE and device:ROLE:held in
-- milliseconds: held by the broker's clock, the uses as the process says. Where a process died, the time until its
-- successor counts as load; two of one name share the time. 'later' if there are no counts yet, or no more.
local function parse(body)
  local read, beat = pcall(cmsgpack.unpack, body or '')
  return read and type(beat) == 'table' and beat or {}
end
local old = redis.call('HGET', SERVICES, ARGV[1])
if ARGV[4] then
  -- After a lost reply, its own heartbeat is there already.
  if old and old ~= ARGV[4] and old ~= ARGV[2] then return old end
end
if redis.call('HSET', SERVICES, ARGV[1], ARGV[2]) == 1 then
  local known, now = redis.call('HGETALL', SERVICES), tonumber(redis.call('TIME')[1])
  for i = 1, #known, 2 do
    local heard = tonumber(parse(known[i + 1]).time) or 0
    if now - heard > tonumber(ARGV[3]) then redis.call('HDEL', SERVICES, known[i]) end
  end
end
local beat, before = parse(ARGV[2]), parse(old)
if (beat.devices or 0) == 0 then return 'ok' end
if redis.call('HEXISTS', COUNTS, 'admitted') == 0 then return 'later' end
local same = before.pid == beat.pid and before.host == beat.host and before.place == beat.place
local base = same and not beat.uncounted and before.device_ms or beat.counted_ms
local spent, sum = {}, 0
for use, ms in pairs(beat.device_ms) do
  spent[use] = math.max(0, ms - (base[use] or 0))
  sum = sum + spent[use]
end
local held = sum
if old and before.time and not beat.uncounted then
  held = math.max(0, (beat.time - before.time) * 1000 * beat.devices)
  if not same and held > sum then spent.load = (spent.load or 0) + held - sum end
  if not same and held < sum then
    for use, ms in pairs(spent) do spent[use] = ms * held / sum end
  end
end
spent.held = held
for use, ms in pairs(spent) do
  redis.call('HINCRBY', COUNTS, 'device:' .. beat.role .. ':' .. use, string.format('%.0f', ms))
end
return 'ok'
