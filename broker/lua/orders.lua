#!lua flags=allow-oom
-- KEYS: CTL ORDERS CHANGES
-- ARGV: pause, checkpoint, stop or replicas:ROLE; its value; who asks. Each order gets the next number, and whoever
-- waits for a change wakes up. Admission looks at `paused` alone. Answers 'same' when nothing changes,
-- and the number of a checkpoint or a stop.
local order, value = ARGV[1], ARGV[2]
if order == 'pause' then
  if (redis.call('HGET', ORDERS, 'pause') or 'none') == value then return 'same' end
  redis.call('HSET', ORDERS, 'pause', value, 'by', ARGV[3], 'since', redis.call('TIME')[1])
  redis.call('HINCRBY', ORDERS, 'pause_id', 1)
  redis.call('HSET', CTL, 'paused', value == 'none' and '0' or '1')
elseif order == 'checkpoint' or order == 'stop' then
  local number = redis.call('HINCRBY', ORDERS, order, 1)
  changed('orders')
  return number
else
  if redis.call('HGET', ORDERS, order) == value then return 'same' end
  redis.call('HSET', ORDERS, order, value)
end
changed('orders')
return 'ok'
