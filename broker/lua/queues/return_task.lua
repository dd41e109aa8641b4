#!lua flags=allow-oom
-- KEYS: GROUPS TASKS EVAL_TASKS
-- ARGV: task id, its entry, its body with partial samples, the generator, how often the task came back without a new
-- token. Returns the task of a generator for another one to take at once, if it is still this generator's.
local task, entry = ARGV[1], ARGV[2]
if redis.call('HGET', GROUPS, task .. ':entry') ~= entry then return 'closed' end
local stream = task_stream(redis.call('HGET', GROUPS, task .. ':kind'))
if not is_pending(stream, GENERATORS, entry, ARGV[4]) then return 'closed' end
local old = redis.call('XRANGE', stream, entry, entry)
if #old == 0 then return 'closed' end
local version = by_name(old[1][2]).v or '0'
local fresh = redis.call('XADD', stream, '*', 't', task, 'v', version, 'b', ARGV[3], 'r', ARGV[5])
redis.call('HSET', GROUPS, task .. ':entry', fresh)
remove(stream, GENERATORS, {entry})
return 'ok'
