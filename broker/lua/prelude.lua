-- Code shared by all scripts. The keys that a script declares in its KEYS line are locals here, under the names of
-- broker/connection/keys.py; a script reaches no other key.
-- Each script gets only the paragraphs that it uses, so no function contains an empty line.
-- A write that is rejected (out of memory) does not undo earlier ones, so in every script the first write is one that
-- memory limits reject, and acknowledgements come last.
local GENERATORS, REWARD, TRAINER = 'generators', 'reward', 'trainer'
local KEEP_DEAD, KEEP_DEAD_BYTES = '1000', 64 * 1024 * 1024

-- Wake the services that wait for a slot or for a change of control state.
local function changed(what)
  redis.call('XADD', CHANGES, 'MAXLEN', '16', '*', 'w', what)
end

-- Wake all services for an order. Generators, of which there may be a thousand, wait for orders only.
local function ordered(what)
  redis.call('XADD', ORDERS, 'MAXLEN', '16', '*', 'w', what)
  changed(what)
end

-- Wake the members that wait for a roll to close, or for a note. Answers wake the trainer alone.
local function roll_changed(what)
  redis.call('XADD', ROLL_CHANGES, 'MAXLEN', '16', '*', 'w', what)
end

-- Delete the oldest sixteenth of a stream until it takes at most so many bytes, but keep the newest entry.
local function trim_bytes(stream, most)
  local left = redis.call('XLEN', stream)
  while left > 1 and redis.call('MEMORY', 'USAGE', stream, 'SAMPLES', '0') > tonumber(most) do
    left = left - math.ceil(left / 16)
    redis.call('XTRIM', stream, 'MAXLEN', left)
  end
end

-- Store a dead letter. All are counted, and the newest are kept, limited in number and bytes, but at least one.
local function keep_dead_letter(letter)
  redis.call('XADD', DEAD, 'MAXLEN', KEEP_DEAD, '*', 'b', letter)
  trim_bytes(DEAD, KEEP_DEAD_BYTES)
  redis.call('HINCRBY', COUNTS, 'dead_letters', 1)
end

-- The stream for tasks of this kind.
local function task_stream(kind)
  if kind == 'eval' then return EVAL_TASKS end
  return TASKS
end

-- Acknowledge and delete entries of a stream, a thousand at a time: Lua cannot unpack many more.
local function remove(stream, group, entries)
  for first = 1, #entries, 1000 do
    local last = math.min(first + 999, #entries)
    redis.call('XACK', stream, group, unpack(entries, first, last))
    redis.call('XDEL', stream, unpack(entries, first, last))
  end
end

-- Fields of an answer that is a flat list of names and values, by name.
local function by_name(flat)
  local named = {}
  for i = 1, #flat, 2 do named[flat[i]] = flat[i + 1] end
  return named
end

-- What the server says of a consumer group, by name; nil if there is no such stream or group.
local function group_info(stream, group)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, flat in ipairs(groups.err and {} or groups) do
    local info = by_name(flat)
    if info['name'] == group then return info end
  end
end

-- Whether an entry is pending, for this consumer if one is given.
local function is_pending(stream, group, entry, consumer)
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  return not pending.err and #pending > 0 and (not consumer or pending[1][2] == consumer)
end

-- Renew the leases of entries (ARGV from the third on) that are pending for the worker (the second), and return those
-- that another worker has claimed.
local function renew_leases(stream, group)
  local taken = {}
  for i = 3, #ARGV do
    local pending = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)
    if #pending > 0 and pending[1][2] == ARGV[2] then
      redis.call('XCLAIM', stream, group, ARGV[2], 0, ARGV[i], 'JUSTID')
    elseif #pending > 0 then
      taken[#taken + 1] = ARGV[i]
    end
  end
  return taken
end

local function term_number(leader_term)
  return tonumber(string.match(leader_term, '^%d+') or -1)
end

-- Only the newest trainer may write. Every script of the trainer starts with this; nil means that it may continue.
-- If the term is missing, or older than the caller's, the broker lost its data.
local function rejected(leader_term)
  local now = redis.call('GET', LEADER_TERM)
  if now == leader_term then return nil end
  if now and term_number(now) >= term_number(leader_term) then return 'fenced' end
  return 'lost'
end

-- Whether a known run is not the caller's; not all callers have an identity.
local function differs(known, id)
  return known and id ~= '' and known ~= id
end

-- Whether a run other than the one with this identity has the name.
local function other_run(id)
  return differs(redis.call('HGET', CTL, 'run_id'), id)
end

-- Identity, folder and host of the run that has the name, and when it began.
local function owner()
  return redis.call('HMGET', CTL, 'run_id', 'run_folder', 'run_host', 'run_since')
end

-- Record which run has the name.
local function own_run(id, folder, host)
  if id == '' then return end
  redis.call('HSET', CTL, 'run_id', id, 'run_folder', folder, 'run_host', host)
  redis.call('HSETNX', CTL, 'run_since', redis.call('TIME')[1])
end

-- The number of slots by staleness bound, batch and look-ahead window (schemas/config/run.py).
local function count_slots(staleness, batch, window)
  return (tonumber(staleness) + 1) * tonumber(batch) - (tonumber(window) - 1)
end

-- Whether the slots hold a batch: with fewer the trainer would wait for ever.
local function enough_slots(staleness, batch, window)
  return count_slots(staleness, batch, window) >= tonumber(batch)
end

local function set_slots()
  local ctl = redis.call('HMGET', CTL, 'staleness', 'batch', 'window')
  redis.call('HSET', CTL, 'slots', count_slots(ctl[1], ctl[2], ctl[3]))
end

-- Delete the body of a task that was stored apart from its entry, as those of evaluations are.
local function forget_body(task, kind)
  if kind == 'eval' then redis.call('HDEL', BODIES, task) end
end

-- Count `count` more outcomes of a group as known; the last one acknowledges the task.
local function outcomes_known(task, count)
  local left = redis.call('HINCRBY', GROUPS, task .. ':left', -count)
  if left <= 0 then
    local kind = redis.call('HGET', GROUPS, task .. ':kind')
    local entry = redis.call('HGET', GROUPS, task .. ':entry')
    remove(task_stream(kind), GENERATORS, {entry})
    forget_body(task, kind)
  end
  return left
end

-- SAMPLES holds the place of a sample, ENTRY/BODY: its entry in the trajectories and the field of its body in BODIES; with
-- '=' before it once it is scored; '-' if it failed. Bodies are large and never pass through a script.
-- An entry of SCORED has outcomes of one group that came together: its task (t), its number of samples (n), and under
-- SAMPLE:PLACE the score of each. One with `end` says that the group, which users may requeue, lost those before it.
local function entry_of(place)
  return string.match(place, '^=?([^/]*)')
end

local function body_of(place)
  return string.match(place, '/(.*)$') or ''
end

-- Delete fields of a hash, a thousand at a time.
local function delete_fields(key, fields)
  for first = 1, #fields, 1000 do
    redis.call('HDEL', key, unpack(fields, first, math.min(first + 999, #fields)))
  end
end

-- Delete the trajectories at these places, entry and body of each.
local function remove_trajectories(places)
  local entries, bodies = {}, {}
  for i, place in ipairs(places) do entries[i], bodies[i] = entry_of(place), body_of(place) end
  remove(TRAJECTORIES, REWARD, entries)
  delete_fields(BODIES, bodies)
end

-- The number of saved pieces of a sample; PARTIALS holds it with the writer, as NUMBER:WRITER.
local function piece_count(saved)
  return tonumber(string.match(saved or '', '^%d+') or 0)
end

-- Delete the saved pieces of samples (TASK:SAMPLE) that are finished or abandoned.
local function forget_partials(samples)
  for _, sample in ipairs(samples) do
    local fields = {sample}
    for piece = 0, piece_count(redis.call('HGET', PARTIALS, sample)) - 1 do fields[#fields + 1] = sample .. ':' .. piece end
    delete_fields(PARTIALS, fields)
  end
end

-- Record the outcome of a group in the statistics of its prompt. `rate`: the share of its samples that are correct, in
-- 1/255, '' if unknown, because it failed. `step`: of the run, nil if the caller may not read it. Four bytes a prompt: the
-- rate of its last groups, their number up to 255, and the step in 1/16.
local RECENT_GROUPS = 4
local function note_outcome(prompt, rate, step)
  local at = 4 * tonumber(prompt)
  local known = redis.call('GETRANGE', PROMPTS, at, at + 3)
  local solved, groups, high, low = 0, 0, 0, 0
  if #known == 4 then solved, groups, high, low = string.byte(known, 1, 4) end
  groups = math.min(groups + 1, 255)
  if rate ~= '' then
    local share = 1 / math.min(groups, RECENT_GROUPS)
    solved = math.floor(solved + (tonumber(rate) - solved) * share + 0.5)
  end
  if step then
    local unit = math.min(math.floor(tonumber(step) / 16), 65535)
    high, low = math.floor(unit / 256), unit % 256
  end
  redis.call('SETRANGE', PROMPTS, at, string.char(solved, groups, high, low))
end

-- The prompt in whose statistics a training group counts; nil without a curriculum.
local function prompt_of(task)
  return redis.call('HGET', GROUPS, task .. ':prompt') or nil
end

-- Record that a group has images; every `step`th of `args` from `first` to `last` is a digest. IMAGES holds the bytes by
-- digest, each once for all groups, and under DIGEST:groups the number of groups that have it.
local function share_images(task, args, first, last, step)
  local known = redis.call('HGET', GROUPS, task .. ':images') or ''
  for i = first, last, step do
    if not string.find(',' .. known .. ',', ',' .. args[i] .. ',', 1, true) then
      redis.call('HINCRBY', IMAGES, args[i] .. ':groups', 1)
      known = known == '' and args[i] or known .. ',' .. args[i]
    end
  end
  if known ~= '' then redis.call('HSET', GROUPS, task .. ':images', known) end
end

-- Store images of a group, digest and bytes in turn in `args` from `first` to `last`.
local function keep_images(task, args, first, last)
  for i = first, last, 2 do redis.call('HSETNX', IMAGES, args[i], args[i + 1]) end
  share_images(task, args, first, last, 2)
end

local function forget_images(digests)
  for digest in string.gmatch(digests or '', '[^,]+') do
    if redis.call('HINCRBY', IMAGES, digest .. ':groups', -1) <= 0 then
      redis.call('HDEL', IMAGES, digest, digest .. ':groups')
    end
  end
end

-- Release what was staged for an evaluation: images, which its tasks share now, and bodies of tasks that it does not have.
-- opened: its tasks, as keys of a table.
local function forget_staged(opened)
  local staged, unused = redis.call('HMGET', GROUPS, 'staged:images', 'staged:tasks'), {}
  forget_images(staged[1])
  for task in string.gmatch(staged[2] or '', '[^,]+') do
    if not opened[task] then unused[#unused + 1] = task end
  end
  delete_fields(BODIES, unused)
  redis.call('HDEL', GROUPS, 'staged:images', 'staged:tasks')
end

-- Delete all data of a group; return how many of its samples had been published. places: a table that collects their
-- places instead, for a caller that deletes many at once.
local function forget(task, places)
  local fields = redis.call('HMGET', GROUPS, task .. ':n', task .. ':kind', task .. ':entry', task .. ':saved', task .. ':images')
  if not fields[1] then return 0 end
  local published = {}
  for first = 0, tonumber(fields[1]) - 1, 1000 do
    local samples = {}
    for sample = first, math.min(first + 1000, tonumber(fields[1])) - 1 do samples[#samples + 1] = task .. ':' .. sample end
    for _, found in ipairs(redis.call('HMGET', SAMPLES, unpack(samples))) do
      if found and found ~= '-' then published[#published + 1] = found end
    end
    redis.call('HDEL', SAMPLES, unpack(samples))
    if fields[4] then forget_partials(samples) end
  end
  if fields[5] then
    forget_images(fields[5])
    redis.call('HDEL', GROUPS, task .. ':images')
  end
  if places then
    for _, place in ipairs(published) do places[(string.gsub(place, '^=', ''))] = true end
  else
    remove_trajectories(published)
  end
  remove(task_stream(fields[2]), GENERATORS, {fields[3]})
  forget_body(task, fields[2])
  redis.call('HDEL', GROUPS, task .. ':n', task .. ':kind', task .. ':entry', task .. ':left', task .. ':open', task .. ':saved', task .. ':prompt', task .. ':tokens')
  if fields[2] == 'eval' then redis.call('HDEL', GROUPS, task .. ':dataset', task .. ':scored', task .. ':correct') end
  return #published
end

-- Record a failed group, so that users can requeue it.
local function note_failed(task)
  redis.call('ZADD', FAILED, redis.call('TIME')[1], task)
  redis.call('ZREMRANGEBYRANK', FAILED, 0, -10001)
end

-- Count sampled tokens that have ended at once, without being in the pipeline.
local function count_tokens(tokens, how)
  if tokens == 0 then return end
  redis.call('HINCRBY', COUNTS, 'tokens_generated', tokens)
  redis.call('HINCRBY', COUNTS, 'tokens:' .. how, tokens)
end

-- Count the tokens of a group as ended, once.
local function end_tokens(task, how)
  local tokens = redis.call('HGET', GROUPS, task .. ':tokens')
  if not tokens then return end
  redis.call('HDEL', GROUPS, task .. ':tokens')
  redis.call('HINCRBY', COUNTS, 'tokens:' .. how, tokens)
end

-- The version that an evaluation task is for.
local function eval_version(task)
  return string.format('%.0f', math.floor(tonumber(task) / 4294967296) - 1)
end

-- Count a sample of an evaluation that has tokens of another version.
local function off_version(task)
  redis.call('HINCRBY', EVALS, eval_version(task) .. ':off_version', 1)
end

-- Count the outcome of an evaluation's sample, in total and by dataset: scored with `reward`, or failed without.
local function eval_outcome(task, dataset, reward, tokens)
  local version = eval_version(task)
  for _, counted in ipairs({version, version .. ':' .. dataset}) do
    if reward then
      redis.call('HINCRBY', EVALS, counted .. ':scored', 1)
      redis.call('HINCRBYFLOAT', EVALS, counted .. ':sum', reward)
      redis.call('HINCRBY', EVALS, counted .. ':tokens', tokens)
    else
      redis.call('HINCRBY', EVALS, counted .. ':failed', 1)
    end
  end
  redis.call('HSET', EVALS, version .. ':time', redis.call('TIME')[1])
end

-- The fields of all evaluations, by version.
local function eval_fields()
  local of_version = {}
  for _, field in ipairs(redis.call('HKEYS', EVALS)) do
    local version = string.match(field, '^(%d+):')
    if version then
      of_version[version] = of_version[version] or {}
      table.insert(of_version[version], field)
    end
  end
  return of_version
end

-- Whether all samples of an evaluation have ended; nil if their number is not known.
local function eval_complete(version)
  local v = redis.call('HMGET', EVALS, version .. ':n', version .. ':scored', version .. ':failed')
  return v[1] and tonumber(v[2] or 0) + tonumber(v[3] or 0) >= tonumber(v[1])
end

-- The dataset of an evaluation task.
local function eval_dataset(task)
  return redis.call('HGET', GROUPS, task .. ':dataset') or ''
end

-- Count `count` more samples of an evaluation task as ended. With the last one, its prompt counts by the numbers of its
-- scored and correct samples, from which pass@k is computed, and its data is deleted.
local function eval_ended(task, count)
  if redis.call('HINCRBY', GROUPS, task .. ':open', -count) > 0 then return end
  local f = redis.call('HMGET', GROUPS, task .. ':dataset', task .. ':scored', task .. ':correct')
  local prompts = (f[1] or '') .. ':prompts:' .. (f[2] or '0') .. ':' .. (f[3] or '0')
  redis.call('HINCRBY', EVALS, eval_version(task) .. ':' .. prompts, 1)
  forget(task)
end
