-- KEYS: COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES PARTIALS EVALS
-- ARGV: task id, the generator's run, samples of an evaluation that are not of its version (`,0,3,`), then sample index,
-- generated tokens and body of each, at most 1000. The first delivery of a sample wins, whoever brings it; the task is
-- acknowledged with its last sample. Returns one word a sample: ok, dup, or closed; or other_run, and takes none.
local task, answers, fields, marks, tokens = ARGV[1], {}, {}, {}, 0
for i = 4, #ARGV, 3 do fields[#fields + 1] = task .. ':' .. ARGV[i] end
if #fields == 0 then return answers end
local group = redis.call('HMGET', GROUPS, task .. ':kind', task .. ':saved', 'run')
if differs(group[3], ARGV[2]) then return {'other_run'} end
local kind = group[1]
local present = redis.call('HMGET', SAMPLES, unpack(fields))
local taken, finished = {}, {}
for k, field in ipairs(fields) do
  local i = 3 * k + 1
  if not kind then
    answers[k] = 'closed'
  elseif present[k] or taken[field] then
    answers[k] = 'dup'
  else
    taken[field] = true
    finished[#finished + 1] = field
    marks[#marks + 1] = field
    marks[#marks + 1] = redis.call('XADD', TRAJECTORIES, '*', 't', task, 's', ARGV[i], 'b', ARGV[i + 2])
    if string.find(ARGV[3], ',' .. ARGV[i] .. ',', 1, true) then off_version(task) end
    tokens = tokens + tonumber(ARGV[i + 1])
    answers[k] = 'ok'
  end
end
if #marks > 0 then
  redis.call('HSET', SAMPLES, unpack(marks))
  if kind == 'train' then redis.call('HINCRBY', COUNTS, 'published', #marks / 2) end
  redis.call('HINCRBY', COUNTS, 'tokens_generated', tokens)
  if group[2] then forget_partials(finished) end
  outcomes_known(task, #marks / 2)
end
return answers
