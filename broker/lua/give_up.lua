#!lua flags=allow-oom
-- KEYS: SLOTS COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES DEAD FAILED CHANGES
-- ARGV: stream, entry, task id ('' when the entry doesn't tell), dead letter.
-- A task that no generator can read or survive: dead letter, and its group fails. Once.
local stream = ({tasks = TASKS, eval_tasks = EVAL_TASKS})[ARGV[1]]
if #redis.call('XRANGE', stream, ARGV[2], ARGV[2]) == 0 then return 'dup' end
bury(ARGV[4])
local task = ARGV[3]
-- Only the entry that the group stands on ends the group; a forged one doesn't.
if task ~= '' and redis.call('HGET', GROUPS, task .. ':entry') == ARGV[2] and redis.call('ZREM', SLOTS, task) == 1 then
  redis.call('HINCRBY', COUNTS, 'failed:dead_letter', 1)
  redis.call('HINCRBY', COUNTS, 'samples_failed', forget(task))
  note_failed(task)
  changed('close')
end
redis.call('XACK', stream, GENERATORS, ARGV[2])
redis.call('XDEL', stream, ARGV[2])
return 'ok'
