-- withdraw (gateway): remove a batch for which no request waits, if no worker serves its lane: otherwise it would stay
-- until its stream expires. A lane with workers is left alone: a worker runs the batch, or finds that it is too late.
-- KEYS: ready, deadlines, vtimes, idle, workers, stream of the lane
-- ARGV: prefix, lane, batch name
-- returns 1 when the batch was removed
local STREAM = KEYS[6]
local lane, name = ARGV[2], ARGV[3]
if is_served(lane) then return 0 end
local removed = 0
for _, entry in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do
  if entry[FIELDS][NAME] == name then removed = removed + remove_waiting(lane, entry[ID]) end
end
return removed
