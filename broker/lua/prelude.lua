-- Shared by every script: the run's keys, in the order of broker/keys.py, and the ways a group's data ends.
-- A refused write (out of memory) does not undo earlier ones, so in every script the first write is one
-- that memory limits refuse, and acknowledgements come last.
local CTL, SLOTS, COUNTS, GROUPS, SAMPLES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local TASKS, EVAL_TASKS, TRAJECTORIES, SCORED = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local DEAD, JOURNAL, EVALS, CHANGES = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local GENERATORS, REWARD, TRAINER = 'generators', 'reward', 'trainer'

-- Wake whoever waits for room or for a change of control state.
local function changed(what)
  redis.call('XADD', CHANGES, 'MAXLEN', '16', '*', 'w', what)
end

-- The stream a task of this kind travels on.
local function task_stream(kind)
  if kind == 'eval' then return EVAL_TASKS end
  return TASKS
end

-- Only the newest trainer may write. Every fenced script starts with this.
local function fenced(epoch)
  return redis.call('HGET', CTL, 'epoch') ~= epoch
end

-- One more outcome of a group is known; with the last one the task itself is acknowledged.
local function outcome_known(task)
  local left = redis.call('HINCRBY', GROUPS, task .. ':left', -1)
  if left <= 0 then
    local kind = redis.call('HGET', GROUPS, task .. ':kind')
    local entry = redis.call('HGET', GROUPS, task .. ':entry')
    redis.call('XACK', task_stream(kind), GENERATORS, entry)
    redis.call('XDEL', task_stream(kind), entry)
  end
  return left
end

-- Forget everything the broker holds of a group; returns how many of its samples had been published.
local function forget(task)
  local fields = redis.call('HMGET', GROUPS, task .. ':n', task .. ':kind', task .. ':entry')
  if not fields[1] then return 0 end
  local published = 0
  for sample = 0, tonumber(fields[1]) - 1 do
    local field = task .. ':' .. sample
    local entry = redis.call('HGET', SAMPLES, field)
    if entry then
      if entry ~= '-' then
        published = published + 1
        redis.call('XACK', TRAJECTORIES, REWARD, entry)
        redis.call('XDEL', TRAJECTORIES, entry)
      end
      redis.call('HDEL', SAMPLES, field)
    end
  end
  redis.call('XACK', task_stream(fields[2]), GENERATORS, fields[3])
  redis.call('XDEL', task_stream(fields[2]), fields[3])
  redis.call('HDEL', GROUPS, task .. ':n', task .. ':kind', task .. ':entry', task .. ':left', task .. ':open')
  return published
end

-- An evaluation counts each sample once.
local function eval_outcome(task, reward)
  local version = string.format('%.0f', math.floor(tonumber(task) / 4294967296) - 1)
  if reward then
    redis.call('HINCRBY', EVALS, version .. ':scored', 1)
    redis.call('HINCRBYFLOAT', EVALS, version .. ':sum', reward)
  else
    redis.call('HINCRBY', EVALS, version .. ':failed', 1)
  end
  redis.call('HSET', EVALS, version .. ':time', redis.call('TIME')[1])
end
