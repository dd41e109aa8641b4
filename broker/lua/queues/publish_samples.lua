-- KEYS: COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES PARTIALS EVALS BODIES
-- ARGV: the generator's run, then for each task its id, its samples with tokens of another version than its
-- evaluation's (`,0,3,`), the number of its samples, at most 1000, and of each the index, the generated tokens, the
-- field of its body in BODIES and the digests of its images, separated by commas. The bodies were stored just before,
-- in the same transaction, under unique names; those of rejected samples are deleted. The first delivery of a sample
-- wins; a task is acknowledged with its last sample. Returns a word for each sample: ok, dup, closed, or images if one
-- of its images is not stored with its group; or other_run alone, and takes none.
local answers, unused = {}, {}
-- An error, before any write, if BODIES is not a hash and holds none of them.
redis.call('HLEN', BODIES)
local others = differs(redis.call('HGET', GROUPS, 'run'), ARGV[1])

-- Whether all of these images are stored with the group; a wiped broker has lost some.
local function keeps(kept, digests)
  for digest in string.gmatch(digests, '[^,]+') do
    if not string.find(',' .. (kept or '') .. ',', ',' .. digest .. ',', 1, true) then return false end
  end
  return true
end

-- Publish the samples of one task, whose arguments lie from `first` to `last`.
local function publish(task, off, first, last)
  local fields, marks, finished, taken, tokens, again = {}, {}, {}, {}, 0, 0
  for i = first, last, 4 do fields[#fields + 1] = task .. ':' .. ARGV[i] end
  local group = redis.call('HMGET', GROUPS, task .. ':kind', task .. ':saved', task .. ':images')
  local present = redis.call('HMGET', SAMPLES, unpack(fields))
  for k, field in ipairs(fields) do
    local i = first + 4 * (k - 1)
    local body, place = ARGV[i + 2], present[k] or taken[field]
    if not group[1] then
      answers[#answers + 1] = 'closed'
      unused[#unused + 1] = body
    elseif place then
      -- The same delivery again after a lost reply gets the same answer: its body is there already.
      local same = body_of(place) == body
      answers[#answers + 1] = same and 'ok' or 'dup'
      if not same then
        unused[#unused + 1] = body
        again = again + tonumber(ARGV[i + 1])
      end
    elseif ARGV[i + 3] ~= '' and not keeps(group[3], ARGV[i + 3]) then
      answers[#answers + 1] = 'images'
      unused[#unused + 1] = body
    else
      finished[#finished + 1] = field
      marks[#marks + 1] = field
      taken[field] = redis.call('XADD', TRAJECTORIES, '*', 't', task, 's', ARGV[i], 'b', body) .. '/' .. body
      marks[#marks + 1] = taken[field]
      if string.find(off, ',' .. ARGV[i] .. ',', 1, true) then off_version(task) end
      tokens = tokens + tonumber(ARGV[i + 1])
      answers[#answers + 1] = 'ok'
    end
  end
  count_tokens(again, 'made_again')
  if #marks == 0 then return end
  redis.call('HSET', SAMPLES, unpack(marks))
  if group[1] == 'train' then
    redis.call('HINCRBY', COUNTS, 'published', #finished)
    redis.call('HINCRBY', COUNTS, 'tokens_generated', tokens)
    redis.call('HINCRBY', GROUPS, task .. ':tokens', tokens)
  else
    count_tokens(tokens, 'evaluation')
  end
  if group[2] then forget_partials(finished) end
  outcomes_known(task, #finished)
end

local at = 2
while at <= #ARGV do
  local first = at + 3
  local last = first + 4 * tonumber(ARGV[at + 2]) - 1
  if others then
    for i = first, last, 4 do unused[#unused + 1] = ARGV[i + 2] end
  elseif last > first then
    publish(ARGV[at], ARGV[at + 1], first, last)
  end
  at = last + 1
end
delete_fields(BODIES, unused)
if others then return {'other_run'} end
return answers
