-- hold (worker): the worker can run these lanes from now on; what already waits in them becomes deliverable.
-- KEYS: lanes the worker holds, lanes it drains, workers
-- ARGV: key prefix, worker, then lanes
-- returns the number of lanes it holds now
local prefix, worker = ARGV[1], ARGV[2]
redis.call('ZADD', KEYS[3], 'NX', clock(), worker) -- else nobody would take back what it leases before its first beat
for i = 3, #ARGV do
  local lane = ARGV[i]
  redis.pcall('XGROUP', 'CREATE', prefix .. 'stream:' .. lane, 'w', '0', 'MKSTREAM')
  redis.call('PERSIST', prefix .. 'stream:' .. lane)
  redis.call('SADD', KEYS[1], lane)
  redis.call('SREM', KEYS[2], lane)
  if undelivered(prefix, lane) > 0 then
    if redis.call('ZSCORE', prefix .. 'idle', worker) then deliver(prefix, lane, worker) end
    if undelivered(prefix, lane) > 0 then
      mark_ready(prefix, lane, clock())
    else
      unmark_ready(prefix, lane)
    end
  end
end
return redis.call('SCARD', KEYS[1])
