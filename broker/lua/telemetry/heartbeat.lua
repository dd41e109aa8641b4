#!lua flags=allow-oom
-- KEYS: SERVICES
-- ARGV: service, heartbeat, seconds of silence after which a service is forgotten; the heartbeat that is known to be
-- left of a dead process, for the first one of a process that may be the only one of its name. Stores a heartbeat, also
-- when memory is full, because its thread renews leases. A first one is not stored when another process has the name:
-- the answer is that one's. A new service deletes those that were silent for too long.
if ARGV[4] then
  local holder = redis.call('HGET', SERVICES, ARGV[1])
  -- Its own is there when the answer to the first try was lost.
  if holder and holder ~= ARGV[4] and holder ~= ARGV[2] then return holder end
end
if redis.call('HSET', SERVICES, ARGV[1], ARGV[2]) == 1 then
  local known, now = redis.call('HGETALL', SERVICES), tonumber(redis.call('TIME')[1])
  for i = 1, #known, 2 do
    local read, beat = pcall(cmsgpack.unpack, known[i + 1])
    local heard = read and type(beat) == 'table' and tonumber(beat.time) or 0
    if now - heard > tonumber(ARGV[3]) then redis.call('HDEL', SERVICES, known[i]) end
  end
end
return 'ok'
