-- lanes_in_use (worker): which of these lanes have entries, and how many workers serve each of some others.
-- KEYS: ready, deadlines, vtimes, idle, workers
-- ARGV: prefix, number of lanes whose workers are counted, these lanes, then lanes whose entries are looked for
-- returns {workers of the first lane, ...}, {lanes with entries, waiting or leased}
local counted = tonumber(ARGV[2])
local holders, used = {}, {}
if counted > 0 then
  local workers = redis.call('ZRANGE', WORKERS, 0, -1)
  for i = 3, counted + 2 do
    local holding = 0
    for _, worker in ipairs(workers) do
      holding = holding + redis.call('SISMEMBER', PREFIX .. 'lanes:' .. worker, ARGV[i])
    end
    holders[#holders + 1] = holding
  end
end
for i = counted + 3, #ARGV do
  if redis.call('XLEN', PREFIX .. 'stream:' .. ARGV[i]) > 0 then used[#used + 1] = ARGV[i] end
end
return {holders, used}
