#!lua flags=allow-oom
-- ARGV: highest epoch on disk, nonce, step, version, cursor, slots, total, trained groups.
-- A trainer takes the run over. What the broker knows wins, unless it knows nothing; numbers never go back.
local known = redis.call('HMGET', CTL, 'epochn', 'version', 'step')
local n = math.max(tonumber(known[1] or 0), tonumber(ARGV[1])) + 1
local epoch = string.format('%d-%s', n, ARGV[2])
redis.call('HSET', CTL, 'epochn', n, 'epoch', epoch)
redis.call('HSET', CTL, 'slots', ARGV[6], 'total', ARGV[7])
redis.call('HSETNX', CTL, 'paused', '0')
redis.call('HSETNX', CTL, 'cursor', ARGV[5])
redis.call('HSETNX', CTL, 'step', ARGV[3])
redis.call('HSETNX', CTL, 'version', ARGV[4])
redis.call('HSETNX', CTL, 'trained', ARGV[8])
redis.call('HSETNX', CTL, 'started', redis.call('TIME')[1])
redis.call('HSET', CTL, 'state', 'running')
changed('begin')
return {epoch, redis.call('HGET', CTL, 'step'), redis.call('HGET', CTL, 'version')}
