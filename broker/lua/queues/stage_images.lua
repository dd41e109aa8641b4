-- KEYS: EVALS GROUPS IMAGES
-- ARGV: version, the feeder's run, then digest and bytes of each image. Keeps a part of the images of an evaluation that is
-- about to be opened, until the next one is: what a feeder that died has left goes with it. Returns 0 when that evaluation
-- was opened before, and needs none; a repeat changes nothing.
if differs(redis.call('HGET', GROUPS, 'run'), ARGV[2]) then return 'other_run' end
if redis.call('HEXISTS', EVALS, ARGV[1] .. ':n') == 1 then
  forget_staged()
  return 0
end
keep_images('staged', ARGV, 3, #ARGV)
return 1
