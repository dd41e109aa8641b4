-- KEYS: LEADER_TERM SCORED
-- ARGV: term, cursor, count. Takes over what earlier trainers had claimed; returns next cursor and entries.
local no = rejected(ARGV[1])
if no then return no end
local reply = redis.call('XAUTOCLAIM', SCORED, TRAINER, 't-' .. ARGV[1], 0, ARGV[2], 'COUNT', ARGV[3])
return {reply[1], reply[2]}
