-- remove_lane (worker): the worker stops serving this lane; after the last worker an empty stream is deleted.
-- KEYS: ready, deadlines, vtimes, idle, workers, lanes that the worker serves, lanes that it drains, stream of the lane
-- ARGV: prefix, worker, lane
-- returns 1 when the stream was deleted
local LANES, DRAINING, STREAM = KEYS[6], KEYS[7], KEYS[8]
local worker, lane = ARGV[2], ARGV[3]
redis.call('SREM', LANES, lane)
if #redis.pcall('XPENDING', STREAM, GROUP, '-', '+', 1, worker) > 0 then
  redis.call('SADD', DRAINING, lane) -- so that its leases are found if it dies before it acknowledges them
else
  redis.call('SREM', DRAINING, lane)
  redis.pcall('XGROUP', 'DELCONSUMER', STREAM, GROUP, worker)
end
return drop_if_unused(lane)
