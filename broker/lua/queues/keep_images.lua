-- KEYS: GROUPS IMAGES
-- ARGV: task id, the generator's run, then digest and bytes of each image. Stores further images of an episode for as
-- long as its group exists; a repeat has no effect. Returns ok, or closed if the group has ended.
local group = redis.call('HMGET', GROUPS, ARGV[1] .. ':kind', 'run')
if differs(group[2], ARGV[2]) then return 'other_run' end
if not group[1] then return 'closed' end
keep_images(ARGV[1], ARGV, 3, #ARGV)
return 'ok'
