-- KEYS: EVALS GROUPS IMAGES BODIES
-- ARGV: version, the feeder's run, 'images' or 'tasks', then name and bytes of each: an image by its digest, a task's
-- body by its id. Stores a part of an evaluation that is about to be opened. The next opened evaluation deletes what a
-- dead feeder left. Returns 0 if the evaluation was opened before; a repeat has no effect.
if differs(redis.call('HGET', GROUPS, 'run'), ARGV[2]) then return 'other_run' end
if redis.call('HEXISTS', EVALS, ARGV[1] .. ':n') == 1 then
  forget_staged({})
  return 0
end
if ARGV[3] == 'images' then
  keep_images('staged', ARGV, 4, #ARGV)
  return 1
end
local known = redis.call('HGET', GROUPS, 'staged:tasks')
local names = known and {known} or {}
for i = 4, #ARGV, 2 do
  if redis.call('HSET', BODIES, ARGV[i], ARGV[i + 1]) == 1 then names[#names + 1] = ARGV[i] end
end
redis.call('HSET', GROUPS, 'staged:tasks', table.concat(names, ','))
return 1
