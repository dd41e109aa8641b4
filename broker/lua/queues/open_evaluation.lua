-- KEYS: EVALS EVAL_TASKS GROUPS COUNTS DEAD IMAGES
-- ARGV: version, the feeder's run, then task id, samples, body, dead letter ('' when there is a body), dataset,
-- number of images, and digest and bytes of each image, of each.
-- Queues one evaluation; a repeat does nothing. A task that is too large to be sent counts as failed.
local version = ARGV[1]
if differs(redis.call('HGET', GROUPS, 'run'), ARGV[2]) then return 'other_run' end
if redis.call('HSETNX', EVALS, version .. ':n', 0) == 0 then return 0 end
local i = 3
while i <= #ARGV do
  local task, samples, dataset = ARGV[i], ARGV[i + 1], ARGV[i + 4]
  redis.call('HINCRBY', EVALS, version .. ':n', samples)
  redis.call('HINCRBY', EVALS, version .. ':' .. dataset .. ':n', samples)
  if ARGV[i + 2] == '' then
    keep_dead_letter(ARGV[i + 3])
    for _ = 1, tonumber(samples) do eval_outcome(task, dataset) end
  else
    local entry = redis.call('XADD', EVAL_TASKS, '*', 't', task, 'v', version, 'b', ARGV[i + 2])
    redis.call('HSET', GROUPS, task .. ':n', samples, task .. ':kind', 'eval', task .. ':entry', entry)
    redis.call('HSET', GROUPS, task .. ':left', samples, task .. ':open', samples, task .. ':dataset', dataset)
    keep_images(task, ARGV, i + 6, i + 5 + 2 * tonumber(ARGV[i + 5]))
  end
  i = i + 6 + 2 * tonumber(ARGV[i + 5])
end
return 1
