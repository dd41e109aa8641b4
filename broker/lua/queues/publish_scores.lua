#!lua flags=allow-oom
-- KEYS: COUNTS GROUPS SAMPLES EVAL_TASKS TRAJECTORIES SCORED DEAD EVALS PARTIALS IMAGES BODIES
-- ARGV, eight for each result, at most 1000 of them: trajectory entry, task id, sample, score body, reward ('' when it
-- failed), loss tokens of the sample, '1' if it is correct, dead letter ('' when none). Returns a word for each: ok, dup or closed.
-- Publishes the scores and acknowledges the trajectories at once, each once. Bodies stay until they are trained.
-- Scores pass when memory is full: they are small, as many as trajectories, and training is what frees it.
local fields, groups, acks, answers = {}, {}, {}, {}
for i = 1, #ARGV, 8 do fields[#fields + 1] = ARGV[i + 1] .. ':' .. ARGV[i + 2] end
local samples = redis.call('HMGET', SAMPLES, unpack(fields))
local state = {}
for k, field in ipairs(fields) do state[field] = samples[k] end

local function score(field, entry, task, index, body, reward, tokens, correct, letter)
  local group = groups[task] or redis.call('HMGET', GROUPS, task .. ':kind', task .. ':n')
  local place = state[field] or '-'
  local mine = entry_of(place) == entry
  if mine and string.sub(place, 1, 1) == '=' then
    -- Delivered again by a group that was made anew, or sent again; its score is out already.
    acks[#acks + 1] = entry
    return 'dup'
  end
  local known = group[1] and mine
  if not known then
    -- The group itself may be gone, with a broker that was wiped.
    local pending = redis.pcall('XPENDING', TRAJECTORIES, REWARD, entry, entry, 1)
    if pending.err or #pending == 0 then return 'dup' end
  end
  if letter ~= '' then keep_dead_letter(letter) end
  if known and group[1] == 'train' then
    groups[task] = group
    redis.call('XADD', SCORED, '*', 't', task, 's', index, 'n', group[2], 'e', place, 'b', body)
    state[field] = '=' .. place
    -- Marked at once: should a later result of this call fail, this score is not sent a second time.
    redis.call('HSET', SAMPLES, field, state[field])
    acks[#acks + 1] = entry
    return 'ok'
  end
  if known then eval_outcome(task, eval_dataset(task), reward ~= '' and reward or nil, tokens) end
  if known and reward ~= '' then
    redis.call('HINCRBY', GROUPS, task .. ':scored', 1)
    if correct == '1' then redis.call('HINCRBY', GROUPS, task .. ':correct', 1) end
  end
  if not known then
    -- No sample refers to this entry, so nobody else does to the body that it names.
    local old = redis.call('XRANGE', TRAJECTORIES, entry, entry)
    for i = 1, old[1] and #old[1][2] or 0, 2 do
      if old[1][2][i] == 'b' then redis.call('HDEL', BODIES, old[1][2][i + 1]) end
    end
    remove(TRAJECTORIES, REWARD, {entry})
    return 'closed'
  end
  remove_trajectories({place})
  state[field] = '-'
  redis.call('HSET', SAMPLES, field, '-')
  eval_ended(task, 1)
  return 'ok'
end

for k, field in ipairs(fields) do
  answers[k] = score(field, unpack(ARGV, 8 * k - 7, 8 * k))
end
if #acks > 0 then redis.call('XACK', TRAJECTORIES, REWARD, unpack(acks)) end
return answers
