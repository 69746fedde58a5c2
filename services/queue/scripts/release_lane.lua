-- release_lane (worker): the worker stops serving a lane that is not in use; otherwise nothing changes.
-- KEYS: ready, deadlines, vtimes, idle, workers, lanes that the worker serves, stream of the lane
-- ARGV: prefix, worker, lane, other workers that must serve the lane
-- returns 1: the worker no longer serves the lane, and leases no entry of it; 0: entries wait in it or are leased, or
-- too few other workers serve it
local LANES, STREAM = KEYS[6], KEYS[7]
local worker, lane, others_min = ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('XLEN', STREAM) > 0 then return 0 end
if others_min > 0 then
  local others = 0
  for _, other in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
    if other ~= worker then others = others + redis.call('SISMEMBER', PREFIX .. 'lanes:' .. other, lane) end
  end
  if others < others_min then return 0 end
end
redis.call('SREM', LANES, lane)
redis.pcall('XGROUP', 'DELCONSUMER', STREAM, GROUP, worker)
drop_if_unused(lane)
return 1
