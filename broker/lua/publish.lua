-- ARGV: task id, then sample index, generated tokens and body of each. The first delivery of a sample wins, whoever brings it;
-- the task is acknowledged with its last sample. Returns one word a sample: ok, dup, or closed.
local task, answers = ARGV[1], {}
local kind = redis.call('HGET', GROUPS, task .. ':kind')
for i = 2, #ARGV, 3 do
  local field = task .. ':' .. ARGV[i]
  if not kind then
    answers[#answers + 1] = 'closed'
  elseif redis.call('HEXISTS', SAMPLES, field) == 1 then
    answers[#answers + 1] = 'dup'
  else
    local entry = redis.call('XADD', TRAJECTORIES, '*', 't', task, 's', ARGV[i], 'b', ARGV[i + 2])
    redis.call('HSET', SAMPLES, field, entry)
    if kind == 'train' then redis.call('HINCRBY', COUNTS, 'published', 1) end
    redis.call('HINCRBY', COUNTS, 'tokens_generated', ARGV[i + 1])
    outcome_known(task)
    answers[#answers + 1] = 'ok'
  end
end
return answers
