#!lua flags=allow-oom
-- KEYS: CTL LEADER_TERM SLOTS COUNTS GROUPS SAMPLES TASKS EVAL_TASKS TRAJECTORIES SCORED DEAD JOURNAL EVALS CHANGES READMIT FAILED WEIGHTS CHUNKS EVENTS METRICS SERVICES PARTIALS IMAGES RUN_CONTROL COUNTERS RECENT EVAL_SAMPLES ORDERS REJECTIONS PEERS ROLL ROLL_ANSWERS ROLL_CHANGES PROMPTS QUESTIONS ANSWERS BODIES LIVE LIVE_SEATS LIVE_BEGUN
-- ARGV: what the trainer knows, as JSON (broker/flow/progress.py, TakeoverRequest), and the statistics of prompts in its
-- checkpoint. A trainer takes the run over.
-- The broker's data counts if it is consistent. It is not if its lifetime is not that of the trainer's checkpoint, a step
-- is missing in its journal, its counts do not add up, a key of the pipeline has the wrong type, or one of its streams is
-- gone: then the pipeline is rebuilt from what the trainer knows. If only its last writes were lost, groups that ended in
-- them are deleted, and groups that were admitted in them are admitted again.
local own = cjson.decode(ARGV[1])
if redis.call('TYPE', CTL).ok == 'hash' and other_run(own.run_id) then
  local other = owner()
  table.insert(other, 1, 'foreign')
  return other
end
local pipeline = {
  {CTL, 'hash'}, {LEADER_TERM, 'string'}, {SLOTS, 'zset'}, {COUNTS, 'hash'}, {GROUPS, 'hash'}, {SAMPLES, 'hash'},
  {TASKS, 'stream'}, {EVAL_TASKS, 'stream'}, {TRAJECTORIES, 'stream'}, {SCORED, 'stream'}, {JOURNAL, 'hash'},
  {READMIT, 'zset'}, {IMAGES, 'hash'}, {BODIES, 'hash'},
}
-- Their content is made again or only for users, so the pipeline continues without it.
local beside = {
  {WEIGHTS, 'stream'}, {CHUNKS, 'hash'}, {DEAD, 'stream'}, {EVALS, 'hash'}, {CHANGES, 'stream'}, {FAILED, 'zset'},
  {PARTIALS, 'hash'}, {EVENTS, 'stream'}, {METRICS, 'stream'}, {SERVICES, 'hash'},
  {RUN_CONTROL, 'hash'}, {COUNTERS, 'hash'}, {RECENT, 'stream'}, {EVAL_SAMPLES, 'stream'}, {ORDERS, 'stream'},
  {REJECTIONS, 'hash'}, {PEERS, 'hash'}, {ROLL, 'hash'}, {ROLL_ANSWERS, 'stream'}, {ROLL_CHANGES, 'stream'}, {PROMPTS, 'string'},
  {QUESTIONS, 'list'}, {ANSWERS, 'stream'}, {LIVE, 'hash'}, {LIVE_SEATS, 'zset'}, {LIVE_BEGUN, 'zset'},
}
local function drop_foreign(types)
  local dropped = false
  for _, pair in ipairs(types) do
    local found = redis.call('TYPE', pair[1]).ok
    if found ~= 'none' and found ~= pair[2] then
      redis.call('DEL', pair[1])
      dropped = true
    end
  end
  return dropped
end
drop_foreign(beside)
local damaged = drop_foreign(pipeline)

local known = redis.call('HMGET', CTL, 'leader_term', 'version', 'step', 'cursor', 'broker_lifetime')
local known_step = tonumber(known[3])
-- The first takeover created the streams, and an empty one stays.
for _, pair in ipairs(known_step and pipeline or {}) do
  if pair[2] == 'stream' and redis.call('EXISTS', pair[1]) == 0 then damaged = true end
end
local n = math.max(tonumber(known[1] or 0), own.leader_term_floor) + 1
local leader_term = string.format('%d-%s', n, own.nonce)
local rebuild = damaged or not known_step or known[5] ~= own.broker_lifetime
if not rebuild then
  for step = own.saved, known_step - 1 do
    if redis.call('HEXISTS', JOURNAL, string.format('%d', step)) == 0 then rebuild = true end
  end
end
-- Groups that hold a slot, ended, or are to be admitted again must be all those below the cursor.
local function ended_untrained()
  local sum = 0
  for _, name in ipairs(redis.call('HKEYS', COUNTS)) do
    if string.match(name, '^dropped:') or string.match(name, '^failed:') then
      sum = sum + tonumber(redis.call('HGET', COUNTS, name))
    end
  end
  return sum
end
if not rebuild then
  local active = redis.call('ZCARD', SLOTS)
  local admitted = tonumber(redis.call('HGET', COUNTS, 'admitted') or 0)
  local ended = tonumber(redis.call('HGET', COUNTS, 'trained') or 0) + ended_untrained()
  local skipped = tonumber(redis.call('HGET', COUNTS, 'skipped') or 0)
  rebuild = admitted ~= active + ended or admitted ~= tonumber(known[4]) - redis.call('ZCARD', READMIT) - skipped
  -- The number of fields would not tell: groups with a curriculum, or with saved samples, have more.
  for _, task in ipairs(rebuild and {} or redis.call('ZRANGE', SLOTS, 0, -1)) do
    for _, field in ipairs(redis.call('HMGET', GROUPS, task .. ':n', task .. ':kind', task .. ':entry', task .. ':left')) do
      if not field then rebuild = true end
    end
  end
end
if rebuild and own.fresh and not damaged and known_step and known_step > 0 then return {'foreign'} end
local counted = tonumber(redis.call('HGET', COUNTS, 'trained') or 0)
local back = not rebuild
  and (known_step < own.step or tonumber(known[4]) < own.cursor or (known_step == own.step and counted ~= own.trained))
-- The broker lost which groups were requeued: groups that it lists as failed may have been trained.
local forgot_requeue = tonumber(redis.call('HGET', COUNTS, 'failed:requeued') or 0) > (own.counts['failed:requeued'] or 0)
local unfinished = {}
for _, id in ipairs(own.unfinished) do unfinished[string.format('%d', id)] = true end

if rebuild then
  redis.call('DEL', SLOTS, GROUPS, SAMPLES, TASKS, EVAL_TASKS, TRAJECTORIES, SCORED, JOURNAL, READMIT, PARTIALS, IMAGES, BODIES)
  redis.call('DEL', COUNTS)
  for name, value in pairs(own.counts) do redis.call('HSET', COUNTS, name, string.format('%d', value)) end
  for task in pairs(unfinished) do redis.call('ZADD', READMIT, task, task) end
  -- Conversations whose samples are made again have lost their answers: no reward may go to what comes instead.
  for _, id in ipairs(redis.call('ZRANGE', LIVE_BEGUN, 0, -1)) do
    local record = redis.call('HGET', LIVE, id)
    local seat = record and cmsgpack.unpack(record).seat
    local task = seat and string.match(seat, '^%d*')
    if not task or unfinished[task] or tonumber(task) >= own.cursor then
      redis.call('HDEL', LIVE, id, seat and 'seat:' .. seat or id)
      redis.call('ZREM', LIVE_BEGUN, id)
    end
  end
  -- An evaluation under way is opened again, as is one with outcomes but without its number of samples.
  for version, fields in pairs(eval_fields()) do
    if not eval_complete(version) then delete_fields(EVALS, fields) end
  end
  redis.call('HSET', CTL, 'step', string.format('%d', own.step), 'cursor', string.format('%d', own.cursor))
end
if back then
  if known_step <= own.step then
    for _, task in ipairs(redis.call('ZRANGE', SLOTS, 0, -1)) do
      if tonumber(task) < own.cursor and not unfinished[task] then
        forget(task)
        redis.call('ZREM', SLOTS, task)
      end
    end
    for _, task in ipairs(redis.call('ZRANGE', READMIT, 0, -1)) do
      if tonumber(task) < own.cursor and not unfinished[task] then redis.call('ZREM', READMIT, task) end
    end
    redis.call('HSET', CTL, 'step', string.format('%d', own.step))
  end
  for task in pairs(unfinished) do
    local asked_again = forgot_requeue and redis.call('ZSCORE', FAILED, task)
    if tonumber(task) >= tonumber(known[4]) or asked_again then redis.call('ZADD', READMIT, task, task) end
  end
  redis.call('HSET', CTL, 'cursor', string.format('%d', math.max(tonumber(known[4]), own.cursor)))
  -- The number of positions before it that were skipped.
  if own.cursor > tonumber(known[4]) then
    redis.call('HSET', COUNTS, 'skipped', string.format('%d', own.counts.skipped or 0))
  end
  if forgot_requeue then redis.call('HSET', COUNTS, 'failed:requeued', string.format('%d', own.counts['failed:requeued'])) end
end
local fresh = rebuild and not known_step and not damaged and own.fresh
local lost = (rebuild and not fresh) or back
local surplus = 0
if rebuild or back then
  local cursor = tonumber(redis.call('HGET', CTL, 'cursor'))
  -- Groups that are made again anyway must not be requeued as well.
  for _, task in ipairs(redis.call('ZRANGE', FAILED, 0, -1)) do
    local again = tonumber(task) >= cursor or redis.call('ZSCORE', READMIT, task) or redis.call('ZSCORE', SLOTS, task)
    if again or forgot_requeue then redis.call('ZREM', FAILED, task) end
  end
  local skipped = tonumber(redis.call('HGET', COUNTS, 'skipped') or 0)
  local admitted = cursor - redis.call('ZCARD', READMIT) - skipped
  local trained = own.trained
  if not rebuild and known_step > own.step then trained = counted end
  local ended = trained + ended_untrained()
  redis.call('HSET', COUNTS, 'admitted', admitted, 'trained', trained)
  -- What was in the pipeline and is lost is generated again.
  local known_tokens = 0
  for _, task in ipairs(redis.call('ZRANGE', SLOTS, 0, -1)) do
    known_tokens = known_tokens + tonumber(redis.call('HGET', GROUPS, task .. ':tokens') or 0)
  end
  local of = redis.call('HGETALL', COUNTS)
  for i = 1, #of, 2 do
    if string.find(of[i], '^tokens:') then known_tokens = known_tokens + tonumber(of[i + 1]) end
  end
  local gone = tonumber(redis.call('HGET', COUNTS, 'tokens_generated') or 0) - known_tokens
  if gone > 0 then redis.call('HINCRBY', COUNTS, 'tokens:made_again', gone) end
  if gone < 0 then redis.call('HINCRBY', COUNTS, 'tokens_generated', -gone) end
  -- Groups whose end the broker has lost. More ends than groups is an error, and shown as such.
  local missing = admitted - redis.call('ZCARD', SLOTS) - ended
  if missing > 0 then redis.call('HINCRBY', COUNTS, 'dropped:unrecorded', missing) end
  if missing < 0 then
    surplus = -missing
    redis.call('HINCRBY', COUNTS, 'dropped:counted_twice', missing)
  end
end

-- The statistics of prompts are as old as the checkpoint if the broker lost them.
if redis.call('EXISTS', PROMPTS) == 0 and ARGV[2] ~= '' then redis.call('SET', PROMPTS, ARGV[2]) end
-- Numbers never go back: a published version always names the same weights.
local version = math.max(tonumber(known[2] or 0), lost and own.version_if_lost or own.version)
redis.call('SET', LEADER_TERM, leader_term)
-- An order of steps, which may be that of eval.patience, ends when the configuration has another number of them.
local own_steps = tonumber(redis.call('HGET', CTL, 'own_steps') or own.steps)
for _, key in ipairs(own_steps ~= own.steps and {CTL, RUN_CONTROL} or {}) do redis.call('HDEL', key, 'set:steps') end
redis.call('HSET', CTL, 'schema', string.format('%d', own.schema), 'leader_term', n, 'version', string.format('%d', version), 'state', 'running')
redis.call('HSET', CTL, 'own_steps', string.format('%d', own.steps), 'window', string.format('%d', own.window))
redis.call('HSET', CTL, 'own_staleness', string.format('%d', own.staleness), 'own_batch', string.format('%d', own.batch))
redis.call('HDEL', CTL, 'cause')
own_run(own.run_id, own.run_folder, own.run_host)
redis.call('HDEL', RUN_CONTROL, 'finished')
redis.call('HSET', CTL, 'max_uncommitted', string.format('%d', own.max_uncommitted))
if lost then
  redis.call('HSET', CTL, 'broker_lifetime', leader_term)
elseif fresh then
  redis.call('HSET', CTL, 'broker_lifetime', own.broker_lifetime)
end
redis.call('HSETNX', CTL, 'started', own.started or redis.call('TIME')[1])
if own.run_id ~= '' then
  redis.call('HSET', RUN_CONTROL, 'run_id', own.run_id, 'run_since', redis.call('HGET', CTL, 'run_since'))
  -- The run whose samples are accepted: generators may not read CTL, so this is beside their task's fields.
  redis.call('HSET', GROUPS, 'run', own.run_id)
end
-- A pause survives the loss of the broker.
if redis.call('HEXISTS', RUN_CONTROL, 'pause_id') == 0 then
  redis.call('HSET', RUN_CONTROL, 'pause', own.pause, 'pause_id', string.format('%d', own.pause_id))
  redis.call('HSET', RUN_CONTROL, 'by', own.pause_by, 'since', string.format('%d', own.pause_since))
end
-- Complete evaluations, too: all samples together, and those of each dataset.
local function put_evaluation(counted, seen)
  local mean = seen.mean
  if mean == cjson.null then mean = 0 end
  redis.call('HSET', EVALS, counted .. ':scored', string.format('%d', seen.scored), counted .. ':sum', string.format('%.17g', mean * seen.scored))
  redis.call('HSET', EVALS, counted .. ':failed', string.format('%d', seen.failed))
  if seen.length and seen.length ~= cjson.null then
    redis.call('HSET', EVALS, counted .. ':tokens', string.format('%.0f', seen.length * seen.scored))
  end
end
for _, seen in ipairs(own.evaluations) do
  local version = string.format('%d', seen.version)
  if redis.call('HSETNX', EVALS, version .. ':n', string.format('%d', seen.n)) == 1 then
    put_evaluation(version, seen)
    redis.call('HSET', EVALS, version .. ':time', string.format('%.17g', seen.time))
    redis.call('HSET', EVALS, version .. ':off_version', string.format('%d', seen.off_version))
    for label, of_dataset in pairs(seen.datasets or {}) do
      local counted = version .. ':' .. label
      redis.call('HSET', EVALS, counted .. ':n', string.format('%d', of_dataset.n))
      put_evaluation(counted, of_dataset)
      for _, prompts in ipairs(of_dataset.prompts) do
        redis.call('HSET', EVALS, string.format('%s:prompts:%d:%d', counted, prompts[1], prompts[2]), string.format('%d', prompts[3]))
      end
    end
  end
end
redis.call('HSET', CTL, 'paused', (redis.call('HGET', RUN_CONTROL, 'pause') or 'none') == 'none' and '0' or '1')
if not known_step then
  for name, value in pairs(own.settings) do redis.call('HSETNX', CTL, 'set:' .. name, string.format('%.17g', value)) end
end
-- Users' settings were checked against an earlier configuration; if they leave too few slots for a batch now, they go.
local set = redis.call('HMGET', CTL, 'set:staleness', 'set:batch')
local rejected_settings = ''
if not enough_slots(set[1] or own.staleness, set[2] or own.batch, own.window) then
  for i, name in ipairs({'staleness', 'batch'}) do
    if set[i] then rejected_settings = rejected_settings .. name .. ' ' .. set[i] .. ' ' end
  end
  for _, key in ipairs({CTL, RUN_CONTROL}) do redis.call('HDEL', key, 'set:staleness', 'set:batch') end
end
for _, name in ipairs(redis.call('HKEYS', CTL)) do
  if string.find(name, '^set:') then redis.call('HSET', RUN_CONTROL, name, redis.call('HGET', CTL, name)) end
end
redis.call('HSET', CTL, 'steps', redis.call('HGET', CTL, 'set:steps') or string.format('%d', own.steps))
for _, name in ipairs({'batch', 'staleness'}) do
  redis.call('HSET', CTL, name, redis.call('HGET', CTL, 'set:' .. name) or string.format('%d', own[name]))
end
set_slots()
for _, pair in ipairs({{TASKS, GENERATORS}, {EVAL_TASKS, GENERATORS}, {TRAJECTORIES, REWARD}, {SCORED, TRAINER}}) do
  local made = redis.pcall('XGROUP', 'CREATE', pair[1], pair[2], '0', 'MKSTREAM')
  if made.err and not string.match(made.err, 'BUSYGROUP') then return made end
end
ordered('take_over')
local now = redis.call('HMGET', CTL, 'step', 'version', 'broker_lifetime', 'started')
return {leader_term, now[1], now[2], now[3], now[4], lost and '1' or '0', string.format('%d', surplus), rejected_settings}
