-- KEYS: COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED DEAD EVALS PARTIALS IMAGES BODIES
-- ARGV: task id, sample, dead letter ('' for none), failed score, the generator's run, the task's entry ('': not looked
-- at), the generator. Marks a sample that could not be produced as failed: its group continues without it. Only the
-- generator that has the task says so; one that lost it, with the broker's data or its lease, leaves that to the next.
local task, field = ARGV[1], ARGV[1] .. ':' .. ARGV[2]
local fields = redis.call('HMGET', GROUPS, task .. ':kind', task .. ':n', 'run', task .. ':entry')
if differs(fields[3], ARGV[5]) then return 'other_run' end
if not fields[1] then return 'closed' end
local entry = ARGV[6]
if entry ~= '' and (fields[4] ~= entry or not is_pending(task_stream(fields[1]), GENERATORS, entry, ARGV[7])) then
  return 'closed'
end
if redis.call('HEXISTS', SAMPLES, field) == 1 then return 'dup' end
if ARGV[3] ~= '' then keep_dead_letter(ARGV[3]) end
redis.call('HSET', SAMPLES, field, '-')
if fields[1] == 'train' then
  redis.call('XADD', SCORED, '*', 't', task, 'n', fields[2], ARGV[2] .. ':-', ARGV[4])
else
  eval_outcome(task, eval_dataset(task))
end
outcomes_known(task, 1)
if fields[1] == 'eval' then eval_ended(task, 1) end
return 'ok'
