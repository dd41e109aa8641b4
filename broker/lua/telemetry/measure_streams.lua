#!lua flags=no-writes,allow-oom
-- KEYS: TASKS EVAL_TASKS TRAJECTORIES SCORED
-- Measures each stream: length, entries read so far, unread (-1 if unknown), pending, id of the oldest pending entry
-- and of the oldest unread one ('' for none). Reads no bodies.
local rows = {}
for i, pair in ipairs({{TASKS, GENERATORS}, {EVAL_TASKS, GENERATORS}, {TRAJECTORIES, REWARD}, {SCORED, TRAINER}}) do
  local row = {0, 0, 0, 0, '', ''}
  local groups = redis.pcall('XINFO', 'GROUPS', pair[1])
  if not groups.err then
    row[1] = redis.call('XLEN', pair[1])
    for _, flat in ipairs(groups) do
      local info = {}
      for k = 1, #flat, 2 do info[flat[k]] = flat[k + 1] end
      if info['name'] == pair[2] then
        row[2] = info['entries-read'] or 0
        row[3] = info['lag'] or -1
        row[4] = info['pending']
        if row[4] > 0 then row[5] = redis.call('XPENDING', pair[1], pair[2])[2] end
        if row[3] ~= 0 then
          local next = redis.call('XRANGE', pair[1], '(' .. info['last-delivered-id'], '+', 'COUNT', 1)[1]
          if next then row[6] = next[1] end
        end
      end
    end
  end
  rows[i] = row
end
return rows
