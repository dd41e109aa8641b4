#!lua flags=allow-oom
-- KEYS: DEAD EVAL_SAMPLES
-- ARGV: bytes to be free. If memory is full, drops the oldest readable samples of evaluations and then the oldest dead
-- letters until so many bytes are free or none is left, because work that waits for memory would wait for ever. Returns
-- how many dead letters it dropped.
local function free()
  local info = redis.call('INFO', 'memory')
  local function figure(name) return tonumber(string.match(info, '\n' .. name .. ':(%d+)') or 0) end
  local most = figure('maxmemory')
  if most == 0 then return math.huge end
  -- As the server counts: buffers for replicas and its append-only file are not part of the limit.
  return most - figure('used_memory') + figure('mem_not_counted_for_evict')
end
local function drop(stream)
  local entries = redis.call('XLEN', stream)
  local left = entries
  while left > 0 and free() < tonumber(ARGV[1]) do
    left = left - math.ceil(left / 16)
    redis.call('XTRIM', stream, 'MAXLEN', left)
  end
  return entries - left
end
drop(EVAL_SAMPLES)
return drop(DEAD)
