#!lua flags=allow-oom
-- KEYS: LEADER_TERM COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED JOURNAL PARTIALS IMAGES
-- ARGV: term, step, number of groups, number of scored entries, task ids, scored entries, then trajectory entries.
-- Deletes the entries of a step that a durable checkpoint covers. Trajectories are named, too, because the data of
-- the group that names them may be gone.
local no = refused(ARGV[1])
if no then return no end
local groups, count = tonumber(ARGV[3]), tonumber(ARGV[4])
for i = 5, 4 + groups do forget(ARGV[i]) end
local scored, bodies = {}, {}
for i = 5 + groups, 4 + groups + count do scored[#scored + 1] = ARGV[i] end
for i = 5 + groups + count, #ARGV do bodies[#bodies + 1] = ARGV[i] end
remove(SCORED, TRAINER, scored)
remove(TRAJECTORIES, REWARD, bodies)
redis.call('HDEL', JOURNAL, ARGV[2])
return 'ok'
