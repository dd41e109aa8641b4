-- KEYS: SLOTS COUNTS READMIT FAILED DEAD CHANGES LIVE LIVE_SEATS LIVE_BEGUN
-- ARGV: dead letter's entry, task id. Admits a failed group again, before all others, and deletes its letter and the
-- record of its conversation, whose reward is not one of the next.
local task = ARGV[2]
if redis.call('ZSCORE', SLOTS, task) then return 'active' end
-- The group waits for admission already; if its letter is gone, this is a repeat of the same call.
if redis.call('ZSCORE', READMIT, task) then
  return #redis.call('XRANGE', DEAD, ARGV[1], ARGV[1]) == 0 and 'ok' or 'waiting'
end
if redis.call('ZREM', FAILED, task) == 0 then return 'trained' end
redis.call('ZADD', READMIT, task, task)
redis.call('HINCRBY', COUNTS, 'admitted', -1)
redis.call('HINCRBY', COUNTS, 'failed:requeued', -1)
redis.call('XDEL', DEAD, ARGV[1])
local seat = 'seat:' .. task .. '-0'
local id = redis.call('HGET', LIVE, seat)
if id then
  redis.call('HDEL', LIVE, seat, id)
  redis.call('ZREM', LIVE_SEATS, id)
  redis.call('ZREM', LIVE_BEGUN, id)
end
changed('requeue_group')
return 'ok'
