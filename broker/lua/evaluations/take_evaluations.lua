-- KEYS: EVAL_TASKS EVALS
-- ARGV: generator, most tasks, its weight version, '1' to take tasks of older versions as well. Takes evaluation tasks
-- for exactly this version, in order. Returns the version of the next task that no generator has taken or -1, whether
-- this version's evaluation was opened, and the taken tasks.
local opened = redis.call('HEXISTS', EVALS, ARGV[3] .. ':n')
local group = group_info(EVAL_TASKS, GENERATORS)
if not group then return {-1, opened, {}} end
local version, fits = tonumber(ARGV[3]), 0
-- One more than can be taken, to return the version of the next.
local entries = redis.call('XRANGE', EVAL_TASKS, '(' .. group['last-delivered-id'], '+', 'COUNT', tonumber(ARGV[2]) + 1)
local pending = -1
for k, entry in ipairs(entries) do
  local wanted = tonumber(by_name(entry[2]).v) or 0
  if k > tonumber(ARGV[2]) or not (wanted == version or (ARGV[4] == '1' and wanted < version)) then
    pending = wanted
    break
  end
  fits = k
end
if fits == 0 then return {pending, opened, {}} end
local reply = redis.call('XREADGROUP', 'GROUP', GENERATORS, ARGV[1], 'COUNT', fits, 'STREAMS', EVAL_TASKS, '>')
return {pending, opened, reply and reply[1][2] or {}}
