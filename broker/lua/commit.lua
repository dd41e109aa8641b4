#!lua flags=allow-oom
-- KEYS: EPOCH COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED JOURNAL
-- ARGV: epoch, step, number of groups, task ids, then scored entries. A durable checkpoint covers this step.
local no = refused(ARGV[1])
if no then return no end
local groups = tonumber(ARGV[3])
for i = 4, 3 + groups do forget(ARGV[i]) end
local scored = {}
for i = 4 + groups, #ARGV do scored[#scored + 1] = ARGV[i] end
remove(SCORED, TRAINER, scored)
redis.call('HDEL', JOURNAL, ARGV[2])
return 'ok'
