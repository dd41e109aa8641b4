-- KEYS: TRAJECTORIES DEAD COUNTS SAMPLES
-- ARGV: entry, dead letter, TASK:SAMPLE that the entry names ('' for none). Files an unreadable trajectory entry of
-- training as a dead letter and deletes it. Once. If its sample exists, its body was lost, which the trainer finds out.
if #redis.call('XRANGE', TRAJECTORIES, ARGV[1], ARGV[1]) == 0 then return 'dup' end
local place = ARGV[3] ~= '' and redis.call('HGET', SAMPLES, ARGV[3])
if place and entry_of(place) == ARGV[1] then return 'damaged' end
keep_dead_letter(ARGV[2])
remove(TRAJECTORIES, REWARD, {ARGV[1]})
return 'ok'
