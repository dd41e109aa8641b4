#!lua flags=allow-oom
-- KEYS: CTL CHANGES
-- ARGV: 'staleness' or 'batch', new value ('' for the configuration's own at the trainer's next start).
-- The ledger admits by it at once, the trainer assembles its next batch by it.
if redis.call('HEXISTS', CTL, 'epochn') == 0 then return 'starting' end
if ARGV[2] == '' then
  redis.call('HDEL', CTL, 'set:' .. ARGV[1])
else
  redis.call('HSET', CTL, 'set:' .. ARGV[1], ARGV[2], ARGV[1], ARGV[2])
  set_slots()
end
changed('settings')
return 'ok'
