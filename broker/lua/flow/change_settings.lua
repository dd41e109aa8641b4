#!lua flags=allow-oom
-- KEYS: CTL RUN_CONTROL CHANGES ORDERS
-- ARGV: name of a setting and its new value ('' restores the configured one), once or more. The ledger admits by the new
-- values at once, the trainer assembles its next batch by them, and generators read theirs among the orders. All or none.
-- A batch or a staleness far above the configured one is a typo that would fill the broker: its name, value, limit and
-- configured value are returned. With fewer slots than a batch needs there would be no step: then the staleness, batch
-- and window that do not fit are returned.
local MOST_TIMES, LEAST_LIMIT = 8, {staleness = 32, batch = 1}
if redis.call('HEXISTS', CTL, 'leader_term') == 0 then return 'starting' end
local now = redis.call('HMGET', CTL, 'staleness', 'batch', 'window', 'own_staleness', 'own_batch')
local wanted, own = {staleness = now[1], batch = now[2]}, {staleness = now[4], batch = now[5]}
for i = 1, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  wanted[name] = value ~= '' and value or own[name]
  if own[name] and value ~= '' then
    local limit = math.max(MOST_TIMES * tonumber(own[name]), LEAST_LIMIT[name])
    if tonumber(value) > limit then return {name, value, string.format('%d', limit), own[name]} end
  end
end
if not enough_slots(wanted.staleness, wanted.batch, now[3]) then return {wanted.staleness, wanted.batch, now[3]} end
for i = 1, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  -- Services read them among the orders.
  for _, key in ipairs({CTL, RUN_CONTROL}) do
    if value == '' then redis.call('HDEL', key, 'set:' .. name) else redis.call('HSET', key, 'set:' .. name, value) end
  end
  -- The number of groups that may be admitted.
  if name == 'steps' then redis.call('HSET', CTL, 'steps', value ~= '' and value or redis.call('HGET', CTL, 'own_steps')) end
end
redis.call('HSET', CTL, 'staleness', wanted.staleness, 'batch', wanted.batch)
set_slots()
ordered('setting')
return 'ok'
