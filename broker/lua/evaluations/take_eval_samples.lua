#!lua flags=allow-oom
-- KEYS: EVAL_SAMPLES
-- ARGV: the entry after which to read, most entries, the entry up to which all are written to the disk ('' for none).
-- Deletes what is written, and returns the next samples of evaluations.
if ARGV[3] ~= '' then
  local ms, number = string.match(ARGV[3], '^(%d+)-(%d+)$')
  redis.call('XTRIM', EVAL_SAMPLES, 'MINID', ms .. '-' .. (tonumber(number) + 1))
end
return redis.call('XRANGE', EVAL_SAMPLES, '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
