-- ARGV: stream key index in KEYS, group, entry, dead letter. An entry nobody can read: kept whole, then removed.
local stream = KEYS[tonumber(ARGV[1])]
redis.call('XADD', DEAD, '*', 'b', ARGV[4])
redis.call('XACK', stream, ARGV[2], ARGV[3])
redis.call('XDEL', stream, ARGV[3])
return 'ok'
