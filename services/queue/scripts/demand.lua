-- demand (gateway): order one worker to load a version that no worker serves. All gateways together order one worker
-- at a time: the first gateway chooses it.
-- KEYS: ready, deadlines, vtimes, idle, workers, demands
-- ARGV: prefix, lane, life of the demand (ms), order (JSON), then workers, the best first
-- returns {worker, 1: ordered now, 0: ordered before}; {'', 0}: a worker serves the lane, or none of them is alive
-- The worker that was ordered before is told again when half of the life is over: those that wait now wait for longer.
-- A demand ends when its worker serves the lane, ends it (end_demand.lua), is gone (reclaim.lua), or after its life.
local DEMANDS = KEYS[6]
local lane, life_ms, order = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local ORDERS_LIFE_S = 3600 -- of orders that a worker does not take
local LIFE_MS_MAX = 60000 -- of a demand of any gateway or worker

local function give(worker)
  redis.call('HSET', DEMANDS, lane, string.format('%s %.0f', worker, clock() + life_ms))
  redis.call('EXPIRE', DEMANDS, ORDERS_LIFE_S)
  redis.call('RPUSH', PREFIX .. 'orders:' .. worker, order)
  redis.call('EXPIRE', PREFIX .. 'orders:' .. worker, ORDERS_LIFE_S)
end

if is_served(lane) then return {'', 0} end
local known = redis.call('HGET', DEMANDS, lane)
if known then
  local worker, until_ms = string.match(known, '^(.*) (%d+)$')
  local left_ms = tonumber(until_ms) - clock() -- more than any life: the clock was set back
  if left_ms > 0 and left_ms <= math.max(life_ms, LIFE_MS_MAX) and redis.call('ZSCORE', WORKERS, worker) then
    if 2 * left_ms < life_ms then give(worker) end
    return {worker, 0}
  end
end
for i = 5, #ARGV do
  local worker = ARGV[i]
  if redis.call('ZSCORE', WORKERS, worker) then
    give(worker)
    return {worker, 1}
  end
end
return {'', 0}
