-- KEYS: EVALS EVAL_TASKS GROUPS COUNTS DEAD
-- ARGV: version, samples per task, the feeder's run, then task id, body and dead letter ('' when there is a body) of each.
-- Queues one evaluation; a repeat does nothing. A task that is too large to be sent counts as failed.
local version = ARGV[1]
if differs(redis.call('HGET', GROUPS, 'run'), ARGV[3]) then return 'other_run' end
if redis.call('HSETNX', EVALS, version .. ':n', (#ARGV - 3) / 3 * tonumber(ARGV[2])) == 0 then return 0 end
for i = 4, #ARGV, 3 do
  local task = ARGV[i]
  if ARGV[i + 1] == '' then
    keep_dead_letter(ARGV[i + 2])
    for _ = 1, tonumber(ARGV[2]) do eval_outcome(task, nil) end
  else
    local entry = redis.call('XADD', EVAL_TASKS, '*', 't', task, 'v', version, 'b', ARGV[i + 1])
    redis.call('HSET', GROUPS, task .. ':n', ARGV[2], task .. ':kind', 'eval', task .. ':entry', entry)
    redis.call('HSET', GROUPS, task .. ':left', ARGV[2], task .. ':open', ARGV[2])
  end
end
return 1
