#!lua flags=no-writes,allow-oom
-- KEYS: PEERS
-- Returns the run's key, '' before any peer served, and the records of all peers with a current lease.
local now = tonumber(redis.call('TIME')[1])
local found = {redis.call('HGET', PEERS, 'key') or ''}
local known = redis.call('HGETALL', PEERS)
for i = 1, #known, 2 do
  local ends, record = string.match(known[i + 1], '^(%d+) (.*)$')
  if known[i] ~= 'key' and ends and tonumber(ends) >= now then found[#found + 1] = record end
end
return found
