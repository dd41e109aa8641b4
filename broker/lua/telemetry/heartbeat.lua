#!lua flags=allow-oom
-- KEYS: SERVICES
-- ARGV: service, heartbeat, seconds of silence after which a service is forgotten. Stores a heartbeat, also when
-- memory is full, because its thread renews leases. A new service deletes those that were silent for too long.
if redis.call('HSET', SERVICES, ARGV[1], ARGV[2]) == 1 then
  local known, now = redis.call('HGETALL', SERVICES), tonumber(redis.call('TIME')[1])
  for i = 1, #known, 2 do
    local read, beat = pcall(cmsgpack.unpack, known[i + 1])
    local heard = read and type(beat) == 'table' and tonumber(beat.time) or 0
    if now - heard > tonumber(ARGV[3]) then redis.call('HDEL', SERVICES, known[i]) end
  end
end
return 'ok'
