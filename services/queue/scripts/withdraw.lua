-- withdraw (gateway): remove a batch for which no request waits, if no worker serves its lane: otherwise it would stay
-- until its stream expires. A lane with workers is left alone: a worker runs the batch, or finds that it is too late.
-- A batch of a version that is refused is removed unless a worker leases it. Its reply is byte 2 and its name.
-- KEYS: ready, deadlines, vtimes, idle, workers, stream of the lane
-- ARGV: prefix, lane, batch name, 1: its version is refused
-- returns 1 when the batch was removed
local STREAM = KEYS[6]
local lane, name, version_refused = ARGV[2], ARGV[3], ARGV[4] == '1'
if not version_refused and is_served(lane) then return 0 end
local removed = 0
for _, entry in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do
  local fields = entry[FIELDS]
  if fields[NAME] == name and remove_waiting(lane, entry[ID]) == 1 then
    removed = removed + 1
    if version_refused then reply(fields[REPLIES], '\2' .. name) end
  end
end
return removed
