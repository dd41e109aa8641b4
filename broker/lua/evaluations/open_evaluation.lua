-- KEYS: EVALS EVAL_TASKS GROUPS COUNTS DEAD IMAGES BODIES
-- ARGV: version, the feeder's run, evaluations kept, then task id, samples, dead letter ('' if it can be sent),
-- dataset, number of images, and their digests, of each. Queues an evaluation whose images and bodies stage_evaluation
-- stored; a repeat has no effect. If one of these is missing, it returns 'again' and does nothing. A task that is too
-- large to be sent counts as failed.
local version = ARGV[1]
if differs(redis.call('HGET', GROUPS, 'run'), ARGV[2]) then return 'other_run' end
local i = 4
while i <= #ARGV do
  local last = i + 4 + tonumber(ARGV[i + 4])
  if ARGV[i + 2] == '' and redis.call('HEXISTS', BODIES, ARGV[i]) == 0 then return 'again' end
  for k = i + 5, last do
    if redis.call('HEXISTS', IMAGES, ARGV[k]) == 0 then return 'again' end
  end
  i = last + 1
end
if redis.call('HSETNX', EVALS, version .. ':n', 0) == 0 then return 0 end
-- The oldest are deleted once they are complete; samples of those under way are still to come.
local function forget_old(kept)
  local of_version, versions = eval_fields(), {}
  for number in pairs(of_version) do
    if redis.call('HEXISTS', EVALS, number .. ':n') == 1 then versions[#versions + 1] = number end
  end
  table.sort(versions, function(a, b) return tonumber(a) < tonumber(b) end)
  for k = 1, #versions - kept do
    if eval_complete(versions[k]) then delete_fields(EVALS, of_version[versions[k]]) end
  end
end
-- Each has at least five fields.
if redis.call('HLEN', EVALS) > 5 * tonumber(ARGV[3]) then forget_old(tonumber(ARGV[3])) end
local opened = {}
i = 4
while i <= #ARGV do
  local task, samples, dataset = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  redis.call('HINCRBY', EVALS, version .. ':n', samples)
  redis.call('HINCRBY', EVALS, version .. ':' .. dataset .. ':n', samples)
  if ARGV[i + 2] ~= '' then
    keep_dead_letter(ARGV[i + 2])
    for _ = 1, tonumber(samples) do eval_outcome(task, dataset) end
  else
    local entry = redis.call('XADD', EVAL_TASKS, '*', 't', task, 'v', version)
    redis.call('HSET', GROUPS, task .. ':n', samples, task .. ':kind', 'eval', task .. ':entry', entry)
    redis.call('HSET', GROUPS, task .. ':left', samples, task .. ':open', samples, task .. ':dataset', dataset)
    share_images(task, ARGV, i + 5, i + 4 + tonumber(ARGV[i + 4]), 1)
    opened[task] = true
  end
  i = i + 5 + tonumber(ARGV[i + 4])
end
forget_staged(opened)
return 1
