#!lua flags=allow-oom
-- KEYS: CTL LEADER_TERM SLOTS COUNTS CHANGES GROUPS PROMPTS
-- ARGV: term, completed step, new version, samples, then the task id of each group and the share of its samples that
-- are correct, in 1/255 ('' if unknown). Returns the slots of what was trained. Once.
local no = rejected(ARGV[1])
if no then return no end
local known = redis.call('HGET', CTL, 'step')
if not known then return 'lost' end
if tonumber(known) >= tonumber(ARGV[2]) then return 'ok' end
-- An earlier step is missing: the broker lost recent writes, and its groups hold their slots again.
if tonumber(known) ~= tonumber(ARGV[2]) - 1 then return 'lost' end
local groups = 0
for i = 5, #ARGV, 2 do
  groups = groups + redis.call('ZREM', SLOTS, ARGV[i])
  end_tokens(ARGV[i], 'trained')
  local prompt = prompt_of(ARGV[i])
  if prompt then note_outcome(prompt, ARGV[i + 1], ARGV[2]) end
end
redis.call('HINCRBY', COUNTS, 'trained', groups)
redis.call('HINCRBY', COUNTS, 'samples_trained', ARGV[4])
redis.call('HSET', CTL, 'step', ARGV[2], 'version', ARGV[3])
changed('complete_step')
return 'ok'
