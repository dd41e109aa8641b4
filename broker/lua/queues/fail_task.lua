#!lua flags=allow-oom
-- KEYS: SLOTS COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED DEAD FAILED CHANGES EVALS PARTIALS IMAGES PROMPTS BODIES
-- ARGV: stream, entry, task id ('' if the entry does not tell), dead letter. Ends a task that no generator can read or
-- survive: it becomes a dead letter, and its group fails. Once. Of an evaluation only the missing samples fail: the
-- others are scored.
local stream = ({tasks = TASKS, eval_tasks = EVAL_TASKS})[ARGV[1]]
if #redis.call('XRANGE', stream, ARGV[2], ARGV[2]) == 0 then return 'dup' end
keep_dead_letter(ARGV[4])
local task = ARGV[3]
-- Only the group's own entry ends the group; a forged one does not.
local stands = task ~= '' and redis.call('HGET', GROUPS, task .. ':entry') == ARGV[2]
if stands and redis.call('HGET', GROUPS, task .. ':kind') == 'eval' then
  local missing, dataset = 0, eval_dataset(task)
  for sample = 0, tonumber(redis.call('HGET', GROUPS, task .. ':n') or 0) - 1 do
    if redis.call('HSETNX', SAMPLES, task .. ':' .. sample, '-') == 1 then
      eval_outcome(task, dataset)
      missing = missing + 1
    end
  end
  outcomes_known(task, missing)
  eval_ended(task, missing)
elseif stands and redis.call('ZREM', SLOTS, task) == 1 then
  redis.call('HINCRBY', COUNTS, 'failed:dead_letter', 1)
  local prompt = prompt_of(task)
  if prompt then note_outcome(prompt, '') end
  end_tokens(task, 'dead_letter')
  redis.call('HINCRBY', COUNTS, 'samples_failed', forget(task))
  note_failed(task)
  redis.call('XADD', SCORED, '*', 't', task, 'end', '1')
  changed('close_group')
end
remove(stream, GENERATORS, {ARGV[2]})
return 'ok'
