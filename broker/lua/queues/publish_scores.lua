#!lua flags=allow-oom
-- KEYS: COUNTS GROUPS SAMPLES EVAL_TASKS TRAJECTORIES SCORED DEAD EVALS PARTIALS IMAGES BODIES
-- ARGV, six for each result, at most 1000 of them: trajectory entry, task id, sample, score body, of an evaluation
-- `REWARD TOKENS CORRECT` of the sample ('' if it failed), dead letter ('' for none). Returns a word for each: ok, dup
-- or closed. Publishes the scores, those of a group as one entry, and acknowledges the trajectories, each once. Bodies
-- stay until they are trained. It works if memory is full: scores are small and as many as trajectories, and training
-- frees memory.
local fields, groups, acks, answers = {}, {}, {}, {}
for i = 1, #ARGV, 6 do fields[#fields + 1] = ARGV[i + 1] .. ':' .. ARGV[i + 2] end
local samples = redis.call('HMGET', SAMPLES, unpack(fields))
local state = {}
for k, field in ipairs(fields) do state[field] = samples[k] end
-- For each training group, in the order of its first result: its entry, what is marked with it, its dead letters.
local outcomes, order = {}, {}

local function score(field, entry, task, index, body, figures, letter)
  local group = groups[task] or redis.call('HMGET', GROUPS, task .. ':kind', task .. ':n')
  local place = state[field] or '-'
  local mine = entry_of(place) == entry
  if mine and string.sub(place, 1, 1) == '=' then
    -- Delivered again by a recreated group, or sent again; its score is published already.
    acks[#acks + 1] = entry
    return 'dup'
  end
  local known = group[1] and mine
  -- The group itself may be gone with a wiped broker.
  if not known and not is_pending(TRAJECTORIES, REWARD, entry) then return 'dup' end
  if known and group[1] == 'train' then
    groups[task] = group
    local out = outcomes[task]
    if not out then
      out = {entry = {'t', task, 'n', group[2]}, marks = {}, letters = {}}
      outcomes[task] = out
      order[#order + 1] = out
    end
    local size, marked = #out.entry, #out.marks
    out.entry[size + 1], out.entry[size + 2] = index .. ':' .. place, body
    state[field] = '=' .. place
    out.marks[marked + 1], out.marks[marked + 2] = field, state[field]
    if letter ~= '' then out.letters[#out.letters + 1] = letter end
    acks[#acks + 1] = entry
    return 'ok'
  end
  if letter ~= '' then keep_dead_letter(letter) end
  if not known then
    -- No sample refers to this entry, so nothing refers to its body.
    local old = redis.call('XRANGE', TRAJECTORIES, entry, entry)
    local body = old[1] and by_name(old[1][2]).b
    if body then redis.call('HDEL', BODIES, body) end
    remove(TRAJECTORIES, REWARD, {entry})
    return 'closed'
  end
  local reward, tokens, correct = string.match(figures, '^(%S+) (%d+) (%d)$')
  eval_outcome(task, eval_dataset(task), reward, tokens)
  if reward then
    redis.call('HINCRBY', GROUPS, task .. ':scored', 1)
    if correct == '1' then redis.call('HINCRBY', GROUPS, task .. ':correct', 1) end
  end
  remove_trajectories({place})
  state[field] = '-'
  redis.call('HSET', SAMPLES, field, '-')
  eval_ended(task, 1)
  return 'ok'
end

for k, field in ipairs(fields) do
  answers[k] = score(field, unpack(ARGV, 6 * k - 5, 6 * k))
end
for _, out in ipairs(order) do
  for _, letter in ipairs(out.letters) do keep_dead_letter(letter) end
  redis.call('XADD', SCORED, '*', unpack(out.entry))
  -- Marked at once: if a later group of this call fails, these scores are not sent again.
  redis.call('HSET', SAMPLES, unpack(out.marks))
end
if #acks > 0 then redis.call('XACK', TRAJECTORIES, REWARD, unpack(acks)) end
return answers
