#!lua flags=no-writes,allow-oom
-- KEYS: CTL LEADER_TERM COUNTS SLOTS READMIT JOURNAL RUN_CONTROL COUNTERS ORDERS
-- Reads the ledger at one moment: term, control state, counts, slots with their sequence, groups to be admitted again,
-- the number of steps that no checkpoint covers, users' orders, and counters of faults. It is a script because a
-- transaction is rejected if memory is full. It also reads ORDERS, so that the trainer notices a key of the wrong type.
redis.call('XLEN', ORDERS)
return {
  redis.call('GET', LEADER_TERM), redis.call('HGETALL', CTL), redis.call('HGETALL', COUNTS),
  redis.call('ZRANGE', SLOTS, 0, -1, 'WITHSCORES'), redis.call('ZRANGE', READMIT, 0, -1), redis.call('HLEN', JOURNAL),
  redis.call('HGETALL', RUN_CONTROL), redis.call('HGETALL', COUNTERS),
}
