-- KEYS: TASKS EVAL_TASKS TRAJECTORIES SCORED DEAD COUNTS
-- ARGV: stream, group, entry, dead letter. An entry nobody can read: kept whole, then removed. Once.
local stream = ({tasks = TASKS, eval_tasks = EVAL_TASKS, trajectories = TRAJECTORIES, scored = SCORED})[ARGV[1]]
if #redis.call('XRANGE', stream, ARGV[3], ARGV[3]) == 0 then return 'dup' end
bury(ARGV[4])
redis.call('XACK', stream, ARGV[2], ARGV[3])
redis.call('XDEL', stream, ARGV[3])
return 'ok'
