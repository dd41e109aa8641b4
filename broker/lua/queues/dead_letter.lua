-- KEYS: TRAJECTORIES DEAD COUNTS
-- ARGV: entry, dead letter. Keeps a trajectory entry that nobody can read as a dead letter, whole, and removes it. Once.
if #redis.call('XRANGE', TRAJECTORIES, ARGV[1], ARGV[1]) == 0 then return 'dup' end
keep_dead_letter(ARGV[2])
redis.call('XACK', TRAJECTORIES, REWARD, ARGV[1])
redis.call('XDEL', TRAJECTORIES, ARGV[1])
return 'ok'
