-- KEYS: GROUPS SAMPLES TASKS EVAL_TASKS PARTIALS
-- ARGV: task id, its entry, the generator, the writer, then sample, number of the piece and its body of each. Saves
-- pieces of unfinished samples, for the generator that goes on with them when this one dies. Only while the task is its
-- own. Piece 0 begins a sample anew, and the others must be of the writer that began it; a repeat changes nothing.
-- Returns for each piece ok, or closed when nothing more of it may be saved.
local task, entry, writer, answers = ARGV[1], ARGV[2], ARGV[4], {}
for i = 5, #ARGV, 3 do answers[#answers + 1] = 'closed' end
local fields = redis.call('HMGET', GROUPS, task .. ':entry', task .. ':kind')
if fields[1] ~= entry then return answers end
local pending = redis.pcall('XPENDING', task_stream(fields[2]), GENERATORS, entry, entry, 1)
if pending.err or #pending == 0 or pending[1][2] ~= ARGV[3] then return answers end
for i = 5, #ARGV, 3 do
  local field, piece = task .. ':' .. ARGV[i], tonumber(ARGV[i + 1])
  local saved = redis.call('HGET', PARTIALS, field)
  local known = piece_count(saved)
  local goes_on = piece == 0 or (piece <= known and saved == known .. ':' .. writer)
  if goes_on and redis.call('HEXISTS', SAMPLES, field) == 0 then
    -- Marked first: what is marked is deleted with its group.
    redis.call('HSET', GROUPS, task .. ':saved', '1')
    redis.call('HSET', PARTIALS, field .. ':' .. piece, ARGV[i + 2], field, (piece + 1) .. ':' .. writer)
    for old = piece + 1, known - 1 do redis.call('HDEL', PARTIALS, field .. ':' .. old) end
    answers[(i - 2) / 3] = 'ok'
  end
end
return answers
