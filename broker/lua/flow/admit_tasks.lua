-- KEYS: CTL SLOTS COUNTS GROUPS TASKS READMIT FAILED DEAD PROMPTS IMAGES
-- ARGV: the feeder's run, then for each task its id, body, samples, dead letter ('' if there is a body), the prompt in
-- whose statistics its outcome counts ('' for none), the number of its images, and digest and bytes of each. Charges a
-- slot for each task and queues it, or rejects it: returns a word for each, and last the id of the next task. A task
-- with neither body nor letter is skipped by the curriculum: the cursor advances, unless the task has to be made again.
-- Tasks to be made again come first, then those at the cursor. Idempotent: a repeat finds that another task is next.
local ctl = redis.call('HMGET', CTL, 'paused', 'slots', 'steps', 'step', 'batch', 'cursor', 'version', 'run_id')
if differs(ctl[8], ARGV[1]) then return {'other_run', '0'} end
if not ctl[6] then return {'starting', '0'} end
local function next_task()
  return redis.call('ZRANGE', READMIT, 0, 0)[1] or redis.call('HGET', CTL, 'cursor')
end
local function taken(entry)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', TASKS)) do
    local ms, number = string.match(entry, '(%d+)-(%d+)')
    local last_ms, last_number = string.match(by_name(group)['last-delivered-id'], '(%d+)-(%d+)')
    if ms ~= last_ms then return tonumber(ms) < tonumber(last_ms) end
    return tonumber(number) <= tonumber(last_number)
  end
  return true
end
-- Users may change settings so that there are more groups than slots. The newest whose task no generator has taken are
-- withdrawn first, and made again when there is room. The others are generated, and trained or dropped as stale.
local function withdraw_surplus(surplus)
  for _, task in ipairs(surplus > 0 and redis.call('ZREVRANGE', SLOTS, 0, surplus - 1) or {}) do
    local f = redis.call('HMGET', GROUPS, task .. ':entry', task .. ':n', task .. ':left', task .. ':images')
    if not f[1] or f[2] ~= f[3] or taken(f[1]) then return end
    -- The broker may be full.
    if type(redis.pcall('ZADD', READMIT, task, task)) == 'table' then return end
    redis.call('HINCRBY', COUNTS, 'admitted', -1)
    forget_images(f[4])
    redis.call('HDEL', GROUPS, task .. ':n', task .. ':kind', task .. ':entry', task .. ':left', task .. ':prompt', task .. ':images')
    redis.call('ZREM', SLOTS, task)
    redis.call('XDEL', TASKS, f[1])
  end
end
local slots, wanted = tonumber(ctl[2]), (tonumber(ctl[3]) - tonumber(ctl[4])) * tonumber(ctl[5])
withdraw_surplus(redis.call('ZCARD', SLOTS) - slots)

-- One task, whose arguments begin at `at`, with images from `first` to `last`.
local function admit(task, at, first, last)
  local id, body, n, letter, prompt = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  if ctl[1] == '1' then return 'paused' end
  if task ~= id then return 'moved' end
  local active = redis.call('ZCARD', SLOTS)
  if active >= wanted then return 'done' end
  if active >= slots then return 'full' end
  if body == '' and letter == '' then
    if redis.call('ZSCORE', READMIT, task) then return 'again' end
    redis.call('HINCRBY', COUNTS, 'skipped', 1)
    redis.call('HINCRBY', CTL, 'cursor', 1)
    return 'skipped'
  end
  if body == '' then
    -- A task that can't be sent: its group fails on admission, and needs no slot.
    keep_dead_letter(letter)
    redis.call('HINCRBY', COUNTS, 'failed:dead_letter', 1)
    note_failed(task)
    if prompt ~= '' then note_outcome(prompt, '', ctl[4]) end
  else
    if last >= first then keep_images(task, ARGV, first, last) end
    local entry = redis.call('XADD', TASKS, '*', 't', task, 'v', ctl[7], 'b', body)
    redis.call('HSET', GROUPS, task .. ':n', n, task .. ':kind', 'train', task .. ':entry', entry, task .. ':left', n)
    if prompt ~= '' then redis.call('HSET', GROUPS, task .. ':prompt', prompt) end
    redis.call('ZADD', SLOTS, redis.call('HINCRBY', CTL, 'seq', 1), task)
  end
  redis.call('HINCRBY', COUNTS, 'admitted', 1)
  if redis.call('ZREM', READMIT, task) == 0 then
    redis.call('HINCRBY', CTL, 'cursor', 1)
  else
    -- It may end once more in the same way, and that is not a repeat.
    redis.call('HDEL', CTL, 'last_close')
  end
  return 'ok'
end

local answers, at, following = {}, 2, next_task()
while at <= #ARGV do
  local first = at + 6
  local last = first + 2 * tonumber(ARGV[at + 5]) - 1
  answers[#answers + 1] = admit(following, at, first, last)
  following = next_task()
  at = last + 1
end
answers[#answers + 1] = following
return answers
