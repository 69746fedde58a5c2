-- put (gateway): append a batch to its lane. An idle worker that serves the lane gets it at once; else the lane becomes
-- ready.
-- KEYS: ready, deadlines, vtimes, idle, workers, stream of the lane
-- ARGV: prefix, lane, encoded batch, attempt, deadline (ms), reply list of the gateway, batch name, cost (ms), fill
-- returns 1: an idle worker has the batch; 0: it waits in the stream
return append(ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9])
