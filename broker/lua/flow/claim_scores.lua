-- KEYS: LEADER_TERM SCORED
-- ARGV: term, count. Claims new scores for the trainer; a fenced trainer gets none into its pending list.
local no = rejected(ARGV[1])
if no then return no end
local reply = redis.call('XREADGROUP', 'GROUP', TRAINER, 't-' .. ARGV[1], 'COUNT', ARGV[2], 'STREAMS', SCORED, '>')
if not reply then return {} end
return reply[1][2]
