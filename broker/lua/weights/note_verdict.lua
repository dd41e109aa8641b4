#!lua flags=allow-oom
-- KEYS: REFUSALS
-- ARGV: version, generator; why it refused the version, which leaves it without weights, empty if it has it in use.
-- Counts the refusals of the newest version that anybody spoke of, with each generator's last reason, and notes whether
-- any generator could use it. An older version is nobody's business any more.
local known = tonumber(redis.call('HGET', REFUSALS, 'version') or -1)
if tonumber(ARGV[1]) < known then return 'old' end
if tonumber(ARGV[1]) > known then
  redis.call('DEL', REFUSALS)
  redis.call('HSET', REFUSALS, 'version', ARGV[1])
end
if ARGV[3] == '' then
  redis.call('HSET', REFUSALS, 'usable', '1')
else
  redis.call('HINCRBY', REFUSALS, 'count', 1)
  redis.call('HSET', REFUSALS, 'last', ARGV[3], 'by:' .. ARGV[2], ARGV[3])
end
return 'ok'
