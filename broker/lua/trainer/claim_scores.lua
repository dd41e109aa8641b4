-- KEYS: LEADER_TERM SCORED
-- ARGV: term, count. New scores for the one trainer; a fenced one gets nothing into its pending list.
local no = refused(ARGV[1])
if no then return no end
local reply = redis.call('XREADGROUP', 'GROUP', TRAINER, 't-' .. ARGV[1], 'COUNT', ARGV[2], 'STREAMS', SCORED, '>')
if not reply then return {} end
return reply[1][2]
