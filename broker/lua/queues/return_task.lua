#!lua flags=allow-oom
-- KEYS: GROUPS TASKS EVAL_TASKS
-- ARGV: task id, its entry, its body with partial samples, the generator, how often the task came back without a new
-- token. Returns the task of a generator for another one to take at once, if it is still this generator's.
local task, entry = ARGV[1], ARGV[2]
if redis.call('HGET', GROUPS, task .. ':entry') ~= entry then return 'closed' end
local stream = task_stream(redis.call('HGET', GROUPS, task .. ':kind'))
local pending = redis.pcall('XPENDING', stream, GENERATORS, entry, entry, 1, ARGV[4])
if pending.err or #pending == 0 then return 'closed' end
local old = redis.call('XRANGE', stream, entry, entry)
if #old == 0 then return 'closed' end
local version = '0'
for i = 1, #old[1][2], 2 do
  if old[1][2][i] == 'v' then version = old[1][2][i + 1] end
end
local fresh = redis.call('XADD', stream, '*', 't', task, 'v', version, 'b', ARGV[3], 'r', ARGV[5])
redis.call('HSET', GROUPS, task .. ':entry', fresh)
redis.call('XACK', stream, GENERATORS, entry)
redis.call('XDEL', stream, entry)
return 'ok'
