#!lua flags=allow-oom
-- KEYS: LEADER_TERM COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED JOURNAL PARTIALS IMAGES BODIES
-- ARGV: term, step, number of groups, number of scored entries, task ids, scored entries, then the places of
-- trajectories (ENTRY/BODY). Deletes the entries of a step that a durable checkpoint covers. The trajectories are
-- passed, too, because the group's data that names them may be gone.
local no = rejected(ARGV[1])
if no then return no end
local groups, count = tonumber(ARGV[3]), tonumber(ARGV[4])
local scored, places, found = {}, {}, {}
for i = 5, 4 + groups do forget(ARGV[i], found) end
for i = 5 + groups, 4 + groups + count do scored[#scored + 1] = ARGV[i] end
for i = 5 + groups + count, #ARGV do
  if not found[ARGV[i]] then places[#places + 1] = ARGV[i] end
end
for place in pairs(found) do places[#places + 1] = place end
remove(SCORED, TRAINER, scored)
remove_trajectories(places)
redis.call('HDEL', JOURNAL, ARGV[2])
return 'ok'
