-- KEYS: GROUPS SAMPLES TASKS EVAL_TASKS PARTIALS
-- ARGV: task id, its entry, the generator, the writer, then sample, number of the piece and its body of each. Saves
-- pieces of unfinished samples for the generator that continues them if this one dies, while the task is this
-- generator's. Piece 0 restarts a sample, and the others must be of the writer of piece 0; a repeat has no effect.
-- Returns for each piece ok, or closed if it may not be saved.
local task, entry, writer, answers = ARGV[1], ARGV[2], ARGV[4], {}
for i = 5, #ARGV, 3 do answers[#answers + 1] = 'closed' end
local fields = redis.call('HMGET', GROUPS, task .. ':entry', task .. ':kind')
if fields[1] ~= entry then return answers end
if not is_pending(task_stream(fields[2]), GENERATORS, entry, ARGV[3]) then return answers end
for i = 5, #ARGV, 3 do
  local field, piece = task .. ':' .. ARGV[i], tonumber(ARGV[i + 1])
  local saved = redis.call('HGET', PARTIALS, field)
  local known = piece_count(saved)
  local goes_on = piece == 0 or (piece <= known and saved == known .. ':' .. writer)
  if goes_on and redis.call('HEXISTS', SAMPLES, field) == 0 then
    -- Marked first, so that it is deleted with its group.
    redis.call('HSET', GROUPS, task .. ':saved', '1')
    redis.call('HSET', PARTIALS, field .. ':' .. piece, ARGV[i + 2], field, (piece + 1) .. ':' .. writer)
    for old = piece + 1, known - 1 do redis.call('HDEL', PARTIALS, field .. ':' .. old) end
    answers[(i - 2) / 3] = 'ok'
  end
end
return answers
