#!lua flags=allow-oom
-- KEYS: LEADER_TERM WEIGHTS
-- ARGV: term, version, manifest. Publishes a version; a number always names one set of weights. It works if memory is
-- full, because only steps free memory; the number of kept versions bounds it.
local no = rejected(ARGV[1])
if no then return no end
local made = redis.pcall('XADD', WEIGHTS, ARGV[2] .. '-1', 'b', ARGV[3])
if type(made) == 'table' and made.err then
  if string.match(made.err, 'equal or smaller') then return 'exists' end
  return made
end
return 'ok'
