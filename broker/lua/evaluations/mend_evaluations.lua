#!lua flags=allow-oom
-- KEYS: GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES EVALS PARTIALS IMAGES BODIES
-- ARGV: cursor of a scan of the groups ('0' to begin), about how many fields to scan. Finds samples of evaluations
-- whose entry, or whose task's entry, is gone, so that no service would work on them; the trainer looks only after
-- groups that hold a slot. They are queued again, or count as failed if their body is gone, too. Returns the next
-- cursor ('0' at the end), then for each open task its id and the numbers of samples that were queued again, that
-- failed, and that are left.
local function is_there(stream, entry)
  return #redis.call('XRANGE', stream, entry, entry) > 0
end

local function mend(task, samples, entry)
  local dataset, queued, again, failed, asked = eval_dataset(task), is_there(EVAL_TASKS, entry), 0, 0, false
  local may_ask = not queued and redis.call('HEXISTS', BODIES, task) == 1
  for sample = 0, samples - 1 do
    local field = task .. ':' .. sample
    local place = redis.call('HGET', SAMPLES, field)
    local published = place and place ~= '-'
    local gone = not place and not queued
    if published then gone = not is_there(TRAJECTORIES, entry_of(place)) end
    if gone and published and redis.call('HEXISTS', BODIES, body_of(place)) == 1 then
      local fresh = redis.call('XADD', TRAJECTORIES, '*', 't', task, 's', sample, 'b', body_of(place))
      redis.call('HSET', SAMPLES, field, fresh .. '/' .. body_of(place))
      again = again + 1
    elseif gone and not published and may_ask then
      asked, again = true, again + 1
    elseif gone then
      if not published then outcomes_known(task, 1) end
      redis.call('HSET', SAMPLES, field, '-')
      eval_outcome(task, dataset)
      failed = failed + 1
    end
  end
  if asked then
    redis.call('HSET', GROUPS, task .. ':entry', redis.call('XADD', EVAL_TASKS, '*', 't', task, 'v', eval_version(task)))
  end
  if failed > 0 then eval_ended(task, failed) end
  return again, failed
end

local page = redis.call('HSCAN', GROUPS, ARGV[1], 'MATCH', '*:open', 'COUNT', ARGV[2])
local answer = {page[1]}
for i = 1, #page[2], 2 do
  local task = string.match(page[2][i], '^(.*):open$')
  local group = redis.call('HMGET', GROUPS, task .. ':n', task .. ':entry')
  if group[1] and group[2] then
    local again, failed = mend(task, tonumber(group[1]), group[2])
    local left = tonumber(page[2][i + 1]) - failed
    for _, part in ipairs({task, again, failed, left}) do answer[#answer + 1] = part end
  end
end
return answer
