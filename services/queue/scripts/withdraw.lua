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
  if entry[FIELDS][NAME] == name then
    local id = entry[ID]
    local leases = redis.pcall('XPENDING', STREAM, GROUP, id, id, 1)
    if #leases == 0 then removed = removed + redis.call('XDEL', STREAM, id) end
  end
end
if removed > 0 and undelivered(lane) == 0 then
  unmark_ready(lane)
  drop_if_unused(lane)
end
return removed
