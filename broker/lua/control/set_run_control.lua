#!lua flags=allow-oom
-- KEYS: CTL RUN_CONTROL CHANGES ORDERS
-- ARGV: pause, checkpoint, stop or replicas:ROLE; its value; who asks. Each order gets the next number, and whoever
-- waits for a change wakes up. Admission looks at `paused` alone. Answers 'same' when nothing changes,
-- and the number of a checkpoint or a stop.
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
else
  if redis.call('HGET', RUN_CONTROL, order) == value then return 'same' end
  redis.call('HSET', RUN_CONTROL, order, value)
end
ordered('run_control')
return 'ok'
