-- add_lanes (worker): the worker serves these lanes from now on; batches that already wait in them can be delivered, and
-- demands for them (demand.lua) are met.
-- KEYS: ready, deadlines, vtimes, idle, workers, lanes that the worker serves, lanes that it drains, demands
-- ARGV: prefix, worker, then lanes
-- returns the number of lanes that the worker serves now
local LANES, DRAINING, DEMANDS = KEYS[6], KEYS[7], KEYS[8]
local worker = ARGV[2]
redis.call('ZADD', WORKERS, 'NX', clock(), worker) -- so that its leases are reclaimed if it dies before its first beat
for i = 3, #ARGV do
  local lane = ARGV[i]
  redis.pcall('XGROUP', 'CREATE', PREFIX .. 'stream:' .. lane, GROUP, '0', 'MKSTREAM')
  redis.call('PERSIST', PREFIX .. 'stream:' .. lane)
  redis.call('SADD', LANES, lane)
  redis.call('SREM', DRAINING, lane)
  redis.call('HDEL', DEMANDS, lane)
  if undelivered(lane) > 0 then
    local long = is_long(lane)
    if redis.call('ZSCORE', IDLE, worker) and (not long or reserve(worker)(lane)) then deliver(lane, worker, long) end
    if undelivered(lane) > 0 then
      mark_ready(lane, clock())
    else
      unmark_ready(lane)
    end
  end
end
return redis.call('SCARD', LANES)
