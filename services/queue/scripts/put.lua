-- put (gateway): append a batch to its lane. An idle worker that serves the lane gets it at once; else the lane becomes
-- ready.
-- KEYS: ready, deadlines, vtimes, idle, workers, stream of the lane
-- ARGV: prefix, lane, encoded batch, attempt, deadline (ms), reply list of the gateway, batch name, cost (ms), fill,
--       1: a call, 0: a readiness probe; how long the lane counts as one with long runs (ms), 0: it does not by this batch
-- returns 1: an idle worker has the batch; 0: it waits in the stream
local lane, call, long_ms = ARGV[2], ARGV[10], tonumber(ARGV[11] or 0)
if long_ms > 0 then note_long(lane, long_ms) end
local delivered, attached = append(lane, ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9])
if call == '1' and (delivered == 0 or attached) then note_called(lane) end
return delivered
