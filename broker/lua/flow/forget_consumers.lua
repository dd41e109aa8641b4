#!lua flags=allow-oom
-- KEYS: LEADER_TERM TASKS EVAL_TASKS TRAJECTORIES SCORED
-- ARGV: term, milliseconds. Deletes consumers that hold nothing and were silent for so long; otherwise the server keeps
-- each name that ever read. A worker that reads again is created again. Returns their number.
local no = rejected(ARGV[1])
if no then return no end
local count = 0
for _, pair in ipairs({{TASKS, GENERATORS}, {EVAL_TASKS, GENERATORS}, {TRAJECTORIES, REWARD}, {SCORED, TRAINER}}) do
  local found = redis.pcall('XINFO', 'CONSUMERS', pair[1], pair[2])
  for _, consumer in ipairs(found.err and {} or found) do
    local named = by_name(consumer)
    if named['pending'] == 0 and named['idle'] >= tonumber(ARGV[2]) then
      redis.call('XGROUP', 'DELCONSUMER', pair[1], pair[2], named['name'])
      count = count + 1
    end
  end
end
return count
