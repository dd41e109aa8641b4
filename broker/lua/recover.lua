-- ARGV: epoch, cursor, count. Takes over what earlier trainers had claimed; returns next cursor and entries.
if fenced(ARGV[1]) then return 'fenced' end
local reply = redis.call('XAUTOCLAIM', SCORED, TRAINER, 't-' .. ARGV[1], 0, ARGV[2], 'COUNT', ARGV[3])
return {reply[1], reply[2]}
