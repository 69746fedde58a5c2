-- order (controller, supervisor): give an order to a worker, unless a newer leader has given orders to its pool.
-- KEYS: ready, deadlines, vtimes, idle, workers, fence
-- ARGV: prefix, fencing token (0: not a controller's), worker ('': none, only keep older leaders away), order (JSON)
-- returns 1: given; 0: the worker is not alive; -1: a newer leader gives the orders
local FENCE = KEYS[6]
local token, worker = tonumber(ARGV[2]), ARGV[3]
local ORDERS_LIFE_S = 3600 -- of orders that a worker does not take
local FENCE_LIFE_S = 86400 -- of the highest token
if token > 0 then
  if tonumber(redis.call('GET', FENCE) or 0) > token then return -1 end
  redis.call('SET', FENCE, ARGV[2], 'EX', FENCE_LIFE_S)
end
if worker == '' then return 1 end
if not redis.call('ZSCORE', WORKERS, worker) then return 0 end
redis.call('RPUSH', PREFIX .. 'orders:' .. worker, ARGV[4])
redis.call('EXPIRE', PREFIX .. 'orders:' .. worker, ORDERS_LIFE_S)
return 1
