-- KEYS: CTL SLOTS COUNTS GROUPS TASKS READMIT FAILED DEAD PROMPTS IMAGES
-- ARGV: task id, task body, samples, dead letter ('' when there is a body), the feeder's run, and the prompt in whose
-- statistic its outcome counts ('' for none), then digest and bytes of each of its images. Charges one slot and queues the task, or says why not; also which task is
-- next. With neither body nor letter the curriculum skips it: the cursor goes on, unless it is to be made again.
-- Tasks to be made again come first, then the cursor goes on. Idempotent: a repeat finds that another is next.
local ctl = redis.call('HMGET', CTL, 'paused', 'slots', 'steps', 'step', 'batch', 'cursor', 'version', 'run_id')
if differs(ctl[8], ARGV[5]) then return {'other_run', '0'} end
if not ctl[6] then return {'starting', '0'} end
local function next_task()
  return redis.call('ZRANGE', READMIT, 0, 0)[1] or redis.call('HGET', CTL, 'cursor')
end
local task = next_task()
if ctl[1] == '1' then return {'paused', task} end
if task ~= ARGV[1] then return {'moved', task} end
local active = redis.call('ZCARD', SLOTS)
if active >= (tonumber(ctl[3]) - tonumber(ctl[4])) * tonumber(ctl[5]) then return {'done', task} end
if active >= tonumber(ctl[2]) then return {'full', task} end
if ARGV[2] == '' and ARGV[4] == '' then
  if redis.call('ZSCORE', READMIT, task) then return {'again', task} end
  redis.call('HINCRBY', COUNTS, 'skipped', 1)
  redis.call('HINCRBY', CTL, 'cursor', 1)
  return {'skipped', next_task()}
end
if ARGV[2] == '' then
  -- A task that nobody can send: its group failed as it came in, and needs no slot.
  keep_dead_letter(ARGV[4])
  redis.call('HINCRBY', COUNTS, 'failed:dead_letter', 1)
  redis.call('HINCRBY', COUNTS, 'admitted', 1)
  note_failed(task)
  if ARGV[6] ~= '' then note_outcome(ARGV[6], '', ctl[4]) end
  if redis.call('ZREM', READMIT, task) == 0 then redis.call('HINCRBY', CTL, 'cursor', 1) end
  return {'ok', next_task()}
end
keep_images(task, ARGV, 7, #ARGV)
local entry = redis.call('XADD', TASKS, '*', 't', task, 'v', ctl[7], 'b', ARGV[2])
redis.call('HSET', GROUPS, task .. ':n', ARGV[3], task .. ':kind', 'train', task .. ':entry', entry, task .. ':left', ARGV[3])
if ARGV[6] ~= '' then redis.call('HSET', GROUPS, task .. ':prompt', ARGV[6]) end
redis.call('ZADD', SLOTS, redis.call('HINCRBY', CTL, 'seq', 1), task)
redis.call('HINCRBY', COUNTS, 'admitted', 1)
if redis.call('ZREM', READMIT, task) == 0 then redis.call('HINCRBY', CTL, 'cursor', 1) end
return {'ok', next_task()}
