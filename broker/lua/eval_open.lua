-- KEYS: EVALS EVAL_TASKS GROUPS
-- ARGV: version, samples per task, then task id and body of each. Queues one evaluation; a repeat does nothing.
local version = ARGV[1]
if redis.call('HSETNX', EVALS, version .. ':n', (#ARGV - 2) / 2 * tonumber(ARGV[2])) == 0 then return 0 end
for i = 3, #ARGV, 2 do
  local task = ARGV[i]
  local entry = redis.call('XADD', EVAL_TASKS, '*', 't', task, 'v', version, 'b', ARGV[i + 1])
  redis.call('HSET', GROUPS, task .. ':n', ARGV[2], task .. ':kind', 'eval', task .. ':entry', entry)
  redis.call('HSET', GROUPS, task .. ':left', ARGV[2], task .. ':open', ARGV[2])
end
return 1
