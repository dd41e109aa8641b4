-- KEYS: TRAJECTORIES DEAD COUNTS SAMPLES
-- ARGV: entry, dead letter, TASK:SAMPLE that it says it is ('' where it says none). Keeps a trajectory entry that nobody can
-- read as a dead letter and removes it; none of an evaluation. Once. One whose sample really is there has lost its body: the
-- trainer finds that.
if #redis.call('XRANGE', TRAJECTORIES, ARGV[1], ARGV[1]) == 0 then return 'dup' end
local place = ARGV[3] ~= '' and redis.call('HGET', SAMPLES, ARGV[3])
if place and entry_of(place) == ARGV[1] then return 'damaged' end
keep_dead_letter(ARGV[2])
redis.call('XACK', TRAJECTORIES, REWARD, ARGV[1])
redis.call('XDEL', TRAJECTORIES, ARGV[1])
return 'ok'
