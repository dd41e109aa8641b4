-- KEYS: EVAL_TASKS EVALS
-- ARGV: generator, most tasks, its weight version, '1' to take tasks of older versions as well. Takes evaluation tasks
-- for exactly this version, in order. Returns the version of the next task that no generator has taken or -1, whether
-- this version's evaluation was opened, and the taken tasks.
local opened = redis.call('HEXISTS', EVALS, ARGV[3] .. ':n')
local groups = redis.pcall('XINFO', 'GROUPS', EVAL_TASKS)
local last = nil
for _, group in ipairs(groups.err and {} or groups) do
  local named = {}
  for i = 1, #group, 2 do named[group[i]] = group[i + 1] end
  if named['name'] == GENERATORS then last = named['last-delivered-id'] end
end
if not last then return {-1, opened, {}} end
local version, fits = tonumber(ARGV[3]), 0
-- One more than can be taken, to return the version of the next.
local entries = redis.call('XRANGE', EVAL_TASKS, '(' .. last, '+', 'COUNT', tonumber(ARGV[2]) + 1)
local pending = -1
for k, entry in ipairs(entries) do
  local wanted = 0
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'v' then wanted = tonumber(entry[2][i + 1]) or 0 end
  end
  if k > tonumber(ARGV[2]) or not (wanted == version or (ARGV[4] == '1' and wanted < version)) then
    pending = wanted
    break
  end
  fits = k
end
if fits == 0 then return {pending, opened, {}} end
local reply = redis.call('XREADGROUP', 'GROUP', GENERATORS, ARGV[1], 'COUNT', fits, 'STREAMS', EVAL_TASKS, '>')
return {pending, opened, reply and reply[1][2] or {}}
