#!lua flags=allow-oom
-- KEYS: SERVICES
-- ARGV: service, heartbeat, seconds of silence after which a service is deleted; for the first heartbeat of a process
-- that must be the only one of its name, the heartbeat that a dead process left ('' for none). Stores a heartbeat, even
-- if memory is full, because its thread renews leases. A first one is not stored if another process has the name: then
-- that process's heartbeat is returned. A new service deletes those that were silent for too long.
if ARGV[4] then
  local holder = redis.call('HGET', SERVICES, ARGV[1])
  -- After a lost reply, its own heartbeat is there already.
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
