-- reclaim (gateway): take back the leases of workers that are dead or silent, and put their batches again.
-- KEYS: workers
-- ARGV: key prefix, lease (ms), most attempts, a worker known to be dead or ''
-- returns {workers removed, batches put again, batches given up}
-- A batch that was tried too often is answered with byte 1 and its name: the gateway decides what then.
local prefix, most = ARGV[1], tonumber(ARGV[3])
local silent = ARGV[4] ~= '' and {ARGV[4]}
  or redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. (clock() - ARGV[2]))
local lanes = {}
-- All of them leave before anything is put again: what one had must not be offered to another that is silent too.
for i, worker in ipairs(silent) do
  local held, drained = prefix .. 'held:' .. worker, prefix .. 'draining:' .. worker
  lanes[i] = redis.call('SUNION', held, drained)
  redis.call('ZREM', prefix .. 'idle', worker)
  redis.call('ZREM', KEYS[1], worker)
  redis.call('DEL', held, drained, prefix .. 'inbox:' .. worker, prefix .. 'record:' .. worker)
end

local again, dead = 0, 0
local function put_again(lane, fields)
  if tonumber(fields[4]) < most then
    append(prefix, lane, fields[2], fields[4] + 1, fields[6], fields[8], fields[10])
    again = again + 1
  else
    redis.call('RPUSH', fields[8], '\1' .. fields[10])
    redis.call('EXPIRE', fields[8], 60)
    dead = dead + 1
  end
end

for i, worker in ipairs(silent) do
  for _, lane in ipairs(lanes[i]) do
    local stream = prefix .. 'stream:' .. lane
    repeat
      local leases = redis.pcall('XPENDING', stream, 'w', '-', '+', 100, worker)
      for _, leased in ipairs(leases) do
        local entry = redis.call('XRANGE', stream, leased[1], leased[1])[1]
        redis.call('XACK', stream, 'w', leased[1])
        redis.call('XDEL', stream, leased[1])
        if entry then put_again(lane, entry[2]) end
      end
    until #leases == 0
    redis.pcall('XGROUP', 'DELCONSUMER', stream, 'w', worker)
    forsake(prefix, lane)
  end
end

-- Streams that nobody holds expire.
for _, lane in ipairs(redis.call('ZRANGE', prefix .. 'ready', 0, 63)) do
  if redis.call('EXISTS', prefix .. 'stream:' .. lane) == 0 then redis.call('ZREM', prefix .. 'ready', lane) end
end
return {#silent, again, dead}
