-- reclaim (gateway): take back the leases of workers that are dead or silent, and put their batches again.
-- KEYS: workers
-- ARGV: key prefix, lease (ms), most attempts, a worker known to be dead or ''
-- returns {workers removed, batches put again, batches given up}
-- A batch that was tried too often is answered with byte 1 and its name: the gateway decides what then.
local prefix, most = ARGV[1], tonumber(ARGV[3])
local now = redis.call('TIME')
local silent = ARGV[4] ~= '' and {ARGV[4]}
  or redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. (now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[2]))
local again, dead = 0, 0
for _, worker in ipairs(silent) do
  local held = prefix .. 'held:' .. worker
  local lanes = redis.call('SMEMBERS', held)
  redis.call('ZREM', prefix .. 'idle', worker)
  redis.call('ZREM', KEYS[1], worker)
  redis.call('DEL', held, prefix .. 'inbox:' .. worker, prefix .. 'record:' .. worker)
  for _, lane in ipairs(lanes) do
    local stream = prefix .. 'stream:' .. lane
    local leases = redis.pcall('XPENDING', stream, 'w', '-', '+', 1000, worker)
    for _, lease in ipairs(leases.err and {} or leases) do
      local entry = redis.call('XRANGE', stream, lease[1], lease[1])[1]
      redis.call('XACK', stream, 'w', lease[1])
      redis.call('XDEL', stream, lease[1])
      if entry then
        local f = entry[2]
        if tonumber(f[4]) < most then
          append(prefix, lane, f[2], f[4] + 1, f[6], f[8], f[10])
          again = again + 1
        else
          redis.call('RPUSH', f[8], '\1' .. f[10])
          redis.call('EXPIRE', f[8], 60)
          dead = dead + 1
        end
      end
    end
    redis.pcall('XGROUP', 'DELCONSUMER', stream, 'w', worker)
  end
end
return {#silent, again, dead}
