-- KEYS: GROUPS SAMPLES TASKS EVAL_TASKS PARTIALS
-- ARGV: task id, its entry, the generator, then sample, number of the piece and its body of each. Saves pieces of
-- unfinished samples, for the generator that goes on with them when this one dies. Only while the task is its own.
-- Piece 0 begins a sample anew; a repeat changes nothing. ok, or closed when nothing more may be saved.
local task, entry, answer = ARGV[1], ARGV[2], 'closed'
local fields = redis.call('HMGET', GROUPS, task .. ':entry', task .. ':kind')
if fields[1] ~= entry then return answer end
local pending = redis.pcall('XPENDING', task_stream(fields[2]), GENERATORS, entry, entry, 1)
if pending.err or #pending == 0 or pending[1][2] ~= ARGV[3] then return answer end
for i = 4, #ARGV, 3 do
  local field, piece = task .. ':' .. ARGV[i], tonumber(ARGV[i + 1])
  local known = tonumber(redis.call('HGET', PARTIALS, field) or 0)
  if redis.call('HEXISTS', SAMPLES, field) == 0 and piece <= known then
    -- Marked first: what is marked is deleted with its group.
    redis.call('HSET', GROUPS, task .. ':saved', '1')
    redis.call('HSET', PARTIALS, field .. ':' .. piece, ARGV[i + 2], field, piece + 1)
    for old = piece + 1, known - 1 do redis.call('HDEL', PARTIALS, field .. ':' .. old) end
    answer = 'ok'
  end
end
return answer
