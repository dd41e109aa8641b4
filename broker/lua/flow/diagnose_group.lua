#!lua flags=no-writes,allow-oom
-- KEYS: SLOTS GROUPS SAMPLES TASKS TRAJECTORIES IMAGES BODIES
-- ARGV: task id of a group. Tells whether the data of the group is complete: 'ended' if it holds no slot, 'waiting' for
-- a generator or a score, 'complete' if all outcomes are on their way to the trainer, otherwise 'damaged'.
local task = ARGV[1]
if not redis.call('ZSCORE', SLOTS, task) then return 'ended' end
local fields = redis.call('HMGET', GROUPS, task .. ':n', task .. ':kind', task .. ':entry', task .. ':left', task .. ':images')
if not (fields[1] and fields[2] and fields[3] and fields[4]) then return 'damaged' end
for digest in string.gmatch(fields[5] or '', '[^,]+') do
  if redis.call('HEXISTS', IMAGES, digest) == 0 then return 'damaged' end
end
local left, missing, open = tonumber(fields[4]), 0, 0
for sample = 0, tonumber(fields[1]) - 1 do
  local found = redis.call('HGET', SAMPLES, task .. ':' .. sample)
  if not found then
    missing = missing + 1
  elseif found ~= '-' then
    if string.sub(found, 1, 1) ~= '=' then open = open + 1 end
    local entry = entry_of(found)
    if redis.call('HEXISTS', BODIES, body_of(found)) == 0 then return 'damaged' end
    if #redis.call('XRANGE', TRAJECTORIES, entry, entry) == 0 then return 'damaged' end
  end
end
if missing ~= left then return 'damaged' end
if left > 0 and #redis.call('XRANGE', TASKS, fields[3], fields[3]) == 0 then return 'damaged' end
if left > 0 or open > 0 then return 'waiting' end
return 'complete'
