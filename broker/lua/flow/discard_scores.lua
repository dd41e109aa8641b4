#!lua flags=allow-oom
-- KEYS: LEADER_TERM COUNTS SCORED DEAD
-- ARGV: term, then scored entry and dead letter ('' for none) of each. Deletes outcomes of groups that have ended.
local no = rejected(ARGV[1])
if no then return no end
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] ~= '' and #redis.call('XRANGE', SCORED, ARGV[i], ARGV[i]) == 1 then keep_dead_letter(ARGV[i + 1]) end
  remove(SCORED, TRAINER, {ARGV[i]})
end
return 'ok'
