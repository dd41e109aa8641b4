#!lua flags=allow-oom
-- KEYS: ROLL ROLL_CHANGES
-- ARGV: communicator, name, note. Leaves a note for the ranks of this communicator, unless it is ''; returns all of its
-- notes, name after name. A note for an earlier communicator is deleted with the next one.
if ARGV[3] ~= '' then
  redis.call('HSET', ROLL, 'note:' .. ARGV[1] .. ':' .. ARGV[2], ARGV[3])
  roll_changed('note')
end
local found, prefix = {}, 'note:' .. ARGV[1] .. ':'
local fields = redis.call('HGETALL', ROLL)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, #prefix) == prefix then
    found[#found + 1] = string.sub(fields[i], #prefix + 1)
    found[#found + 1] = fields[i + 1]
  end
end
return found
