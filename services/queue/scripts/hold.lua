-- hold (worker): the worker can run these lanes from now on; what already waits in them becomes deliverable.
-- KEYS: lanes the worker holds
-- ARGV: key prefix, worker, then lanes
-- returns the number of lanes it holds now
local prefix = ARGV[1]
for i = 3, #ARGV do
  local lane = ARGV[i]
  redis.pcall('XGROUP', 'CREATE', prefix .. 'stream:' .. lane, 'w', '0', 'MKSTREAM')
  redis.call('SADD', KEYS[1], lane)
  if undelivered(prefix, lane) > 0 then
    if redis.call('ZSCORE', prefix .. 'idle', ARGV[2]) then deliver(prefix, lane, ARGV[2]) end
    if undelivered(prefix, lane) > 0 then
      redis.call('ZADD', prefix .. 'ready', 'LT', redis.call('TIME')[1] * 1000, lane)
    else
      redis.call('ZREM', prefix .. 'ready', lane)
    end
  end
end
return redis.call('SCARD', KEYS[1])
