#!lua flags=allow-oom
-- KEYS: CTL RUN_CONTROL CHANGES ORDERS
-- ARGV: name of a setting and its new value ('' restores the configured one: of staleness and batch at the trainer's
-- next start), once or more. The ledger admits by the new values at once, the trainer assembles its next batch by them,
-- and generators read theirs among the orders. All or none: with fewer slots than a batch needs there would be no step;
-- then the staleness, batch and window that do not fit are returned.
if redis.call('HEXISTS', CTL, 'leader_term') == 0 then return 'starting' end
local now = redis.call('HMGET', CTL, 'staleness', 'batch', 'window')
local wanted = {staleness = now[1], batch = now[2]}
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then wanted[ARGV[i]] = ARGV[i + 1] end
end
if not enough_slots(wanted.staleness, wanted.batch, now[3]) then return {wanted.staleness, wanted.batch, now[3]} end
for i = 1, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  if value == '' then redis.call('HDEL', CTL, 'set:' .. name) else redis.call('HSET', CTL, 'set:' .. name, value) end
  if name == 'concurrency' then redis.call('HSET', RUN_CONTROL, 'concurrency', value)
  elseif name ~= 'staleness' and name ~= 'batch' then
    -- Services read these among the orders.
    if value == '' then redis.call('HDEL', RUN_CONTROL, 'set:' .. name) else redis.call('HSET', RUN_CONTROL, 'set:' .. name, value) end
  end
  -- The number of groups that may be admitted.
  if name == 'steps' then redis.call('HSET', CTL, 'steps', value ~= '' and value or redis.call('HGET', CTL, 'own_steps')) end
end
redis.call('HSET', CTL, 'staleness', wanted.staleness, 'batch', wanted.batch)
set_slots()
ordered('setting')
return 'ok'
