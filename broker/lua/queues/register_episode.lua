-- KEYS: LIVE LIVE_SEATS LIVE_BEGUN GROUPS
-- ARGV: sample (TASK-SAMPLE), id for a new episode ('' to let go of it), address of its session, generator. A generator
-- offers a sample to a user's conversation, or says where the conversation of the sample continues, or that this session
-- does not continue it. LIVE has the record of each episode by its id, and under seat:SAMPLE the id; LIVE_SEATS the ids
-- that no conversation has yet. Returns id and record, nothing for a session that let go.
local run = redis.call('HGET', GROUPS, 'run') or ''
local seat = 'seat:' .. ARGV[1]
local id = redis.call('HGET', LIVE, seat)
local known = id and redis.call('HGET', LIVE, id)
local record = known and cmsgpack.unpack(known)
if ARGV[2] == '' then
  -- Another session may have it already, of this generator too.
  if record and record.url == ARGV[3] then
    record.url = ''
    redis.call('HSET', LIVE, id, cmsgpack.pack(record))
  end
  return false
end
if not record or record.run ~= run then
  if record then
    redis.call('HDEL', LIVE, id)
    redis.call('ZREM', LIVE_SEATS, id)
    redis.call('ZREM', LIVE_BEGUN, id)
  end
  id, record = ARGV[2], {run = run, seat = ARGV[1], begun = 0, url = '', generator = ''}
  redis.call('HSET', LIVE, seat, id)
  redis.call('ZADD', LIVE_SEATS, redis.call('TIME')[1], id)
end
record.url, record.generator = ARGV[3], ARGV[4]
local packed = cmsgpack.pack(record)
redis.call('HSET', LIVE, id, packed)
return {id, packed}
