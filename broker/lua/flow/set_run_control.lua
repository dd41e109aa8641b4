#!lua flags=allow-oom
-- KEYS: CTL RUN_CONTROL CHANGES ORDERS
-- ARGV: pause, checkpoint, stop, evaluate, mismatch:GENERATOR or replicas:ROLE; its value; who orders it. Each order gets the next number
-- and wakes the services that wait. Admission reads `paused` alone; the value of evaluate is a weight version. Returns
-- 'same' if nothing changes, and the number of a checkpoint or a stop. The same number of replicas is an order
-- nevertheless, because a replica that failed may be missing.
local order, value = ARGV[1], ARGV[2]
if order == 'pause' then
  if (redis.call('HGET', RUN_CONTROL, 'pause') or 'none') == value then return 'same' end
  redis.call('HSET', RUN_CONTROL, 'pause', value, 'by', ARGV[3], 'since', redis.call('TIME')[1])
  redis.call('HINCRBY', RUN_CONTROL, 'pause_id', 1)
  redis.call('HSET', CTL, 'paused', value == 'none' and '0' or '1')
elseif order == 'checkpoint' or order == 'stop' then
  local number = redis.call('HINCRBY', RUN_CONTROL, order, 1)
  ordered('run_control')
  return number
elseif order == 'evaluate' or string.find(order, '^mismatch:') then
  if redis.call('HGET', RUN_CONTROL, order) == value then return 'same' end
  redis.call('HSET', RUN_CONTROL, order, value)
else
  local same = redis.call('HGET', RUN_CONTROL, order) == value
  redis.call('HSET', RUN_CONTROL, order, value)
  redis.call('HINCRBY', RUN_CONTROL, string.gsub(order, '^replicas:', 'scaled:'), 1)
  if same then
    changed('run_control')
    return 'same'
  end
end
ordered('run_control')
return 'ok'
