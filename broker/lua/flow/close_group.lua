#!lua flags=allow-oom
-- KEYS: CTL PROMPTS LEADER_TERM SLOTS COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED FAILED CHANGES PARTIALS IMAGES BODIES
-- ARGV: task id, 'dropped' or 'failed', reason, term, share of correct samples in 1/255 ('' if unknown), then scored
-- entries. Ends a group that is not trained: its slot returns, its data is deleted. Once: a trainer ends one group at a
-- time, so its last end is kept, and a repeat of it gets the same answer.
local no = rejected(ARGV[4])
if no then return no end
local task, call = ARGV[1], table.concat({ARGV[1], ARGV[2], ARGV[3], ARGV[4]}, ' ')
if redis.call('ZREM', SLOTS, task) == 0 then return redis.call('HGET', CTL, 'last_close') == call and 'ok' or 'closed' end
redis.call('HSET', CTL, 'last_close', call)
redis.call('HINCRBY', COUNTS, ARGV[2] .. ':' .. ARGV[3], 1)
local prompt = prompt_of(task)
if prompt then note_outcome(prompt, ARGV[5], redis.call('HGET', CTL, 'step') or '0') end
end_tokens(task, ARGV[3])
redis.call('HINCRBY', COUNTS, 'samples_' .. ARGV[2], forget(task))
if ARGV[2] == 'failed' then note_failed(task) end
local scored = {}
for i = 6, #ARGV do scored[#scored + 1] = ARGV[i] end
remove(SCORED, TRAINER, scored)
changed('close_group')
return 'ok'
