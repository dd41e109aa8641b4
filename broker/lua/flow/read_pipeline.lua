#!lua flags=no-writes,allow-oom
-- KEYS: CTL LEADER_TERM COUNTS SLOTS READMIT JOURNAL RUN_CONTROL COUNTERS ORDERS
-- Reads the ledger at one moment: term, control state, counts, slots with their sequence, what is to be admitted again,
-- how many steps no checkpoint covers, the orders of people, and counts of faults. A script, because a transaction is refused when memory is full.
-- Generators alone wait for these; a value of another type there has to be noticed by the trainer, which mends it.
redis.call('XLEN', ORDERS)
return {
  redis.call('GET', LEADER_TERM), redis.call('HGETALL', CTL), redis.call('HGETALL', COUNTS),
  redis.call('ZRANGE', SLOTS, 0, -1, 'WITHSCORES'), redis.call('ZRANGE', READMIT, 0, -1), redis.call('HLEN', JOURNAL),
  redis.call('HGETALL', RUN_CONTROL), redis.call('HGETALL', COUNTERS),
}
