#!lua flags=allow-oom
-- KEYS: CTL RUN_CONTROL CHANGES
-- ARGV: 'staleness', 'batch' or 'concurrency', new value ('' for the configuration's own at the trainer's next start).
-- The ledger admits by it at once, the trainer assembles its next batch by it, generators read theirs among the orders.
if redis.call('HEXISTS', CTL, 'leader_term') == 0 then return 'starting' end
if ARGV[1] == 'concurrency' then
  redis.call('HSET', RUN_CONTROL, 'concurrency', ARGV[2])
  if ARGV[2] == '' then redis.call('HDEL', CTL, 'set:concurrency') else redis.call('HSET', CTL, 'set:concurrency', ARGV[2]) end
elseif ARGV[2] == '' then
  redis.call('HDEL', CTL, 'set:' .. ARGV[1])
else
  redis.call('HSET', CTL, 'set:' .. ARGV[1], ARGV[2], ARGV[1], ARGV[2])
  set_slots()
end
changed('setting')
return 'ok'
