#!lua flags=allow-oom
-- KEYS: REJECTIONS
-- ARGV: version, generator, why it rejects the version, which leaves it without weights ('' if it uses the version).
-- Counts the rejections of the newest version with a verdict, with each generator's last reason, and whether any
-- generator could use it. Verdicts on older versions have no effect.
local known = tonumber(redis.call('HGET', REJECTIONS, 'version') or -1)
if tonumber(ARGV[1]) < known then return 'old' end
if tonumber(ARGV[1]) > known then
  redis.call('DEL', REJECTIONS)
  redis.call('HSET', REJECTIONS, 'version', ARGV[1])
end
if ARGV[3] == '' then
  redis.call('HSET', REJECTIONS, 'usable', '1')
else
  redis.call('HINCRBY', REJECTIONS, 'count', 1)
  redis.call('HSET', REJECTIONS, 'last', ARGV[3], 'by:' .. ARGV[2], ARGV[3])
end
return 'ok'
