#!lua flags=allow-oom
-- KEYS: PEERS
-- ARGV: peer, its record, seconds of its lease (0 to leave), a key for a run that has none. Registers where a peer
-- serves weights, and deletes peers whose lease has ended. Returns the run's key, by which peers authenticate each
-- other. It works if memory is full, as weights do.
redis.call('HSETNX', PEERS, 'key', ARGV[4])
local now = tonumber(redis.call('TIME')[1])
if ARGV[3] == '0' then
  redis.call('HDEL', PEERS, 'peer:' .. ARGV[1])
else
  redis.call('HSET', PEERS, 'peer:' .. ARGV[1], (now + tonumber(ARGV[3])) .. ' ' .. ARGV[2])
end
local known = redis.call('HGETALL', PEERS)
for i = 1, #known, 2 do
  if known[i] ~= 'key' and (tonumber(string.match(known[i + 1], '^%d+')) or 0) < now then
    redis.call('HDEL', PEERS, known[i])
  end
end
return redis.call('HGET', PEERS, 'key')
