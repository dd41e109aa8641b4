#!lua flags=no-writes,allow-oom
-- KEYS: TASKS EVAL_TASKS TRAJECTORIES SCORED
-- Measures each stream: length, entries read so far, unread (-1 if unknown), pending, id of the oldest pending entry
-- and of the oldest unread one ('' for none). Reads no bodies.
local rows = {}
for i, pair in ipairs({{TASKS, GENERATORS}, {EVAL_TASKS, GENERATORS}, {TRAJECTORIES, REWARD}, {SCORED, TRAINER}}) do
  local row = {0, 0, 0, 0, '', ''}
  local group = group_info(pair[1], pair[2])
  local length = redis.pcall('XLEN', pair[1])
  if type(length) == 'number' then row[1] = length end
  if group then
    row[2] = group['entries-read'] or 0
    row[3] = group['lag'] or -1
    row[4] = group['pending']
    if row[4] > 0 then row[5] = redis.call('XPENDING', pair[1], pair[2])[2] end
    if row[3] ~= 0 then
      local next = redis.call('XRANGE', pair[1], '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
      if next then row[6] = next[1] end
    end
  end
  rows[i] = row
end
return rows
