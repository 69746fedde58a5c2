-- Shared by the scripts below: hand the next undelivered entry of a lane to an idle worker that holds it.
-- offer(prefix, lane) -> id of the delivered entry, or nil when no idle worker holds the lane.
-- An idle worker stops being idle the moment an entry lies in its inbox.
local PAGE = 32

local function deliver(prefix, lane, worker)
  local stream = prefix .. 'stream:' .. lane
  local got = redis.call('XREADGROUP', 'GROUP', 'w', worker, 'COUNT', 1, 'STREAMS', stream, '>')
  if not got then return nil end
  local entry = got[1][2][1]
  redis.call('RPUSH', prefix .. 'inbox:' .. worker, cmsgpack.pack({lane, entry[1], entry[2][2], entry[2][4]}))
  redis.call('ZREM', prefix .. 'idle', worker)
  return entry[1]
end

local function offer(prefix, lane)
  local start = 0
  while true do
    local idle = redis.call('ZRANGE', prefix .. 'idle', start, start + PAGE - 1)
    for _, worker in ipairs(idle) do
      if redis.call('SISMEMBER', prefix .. 'held:' .. worker, lane) == 1 then
        return deliver(prefix, lane, worker)
      end
    end
    if #idle < PAGE then return nil end
    start = start + PAGE
  end
end

-- How many entries of a lane no worker has yet. 0 when nobody ever held the lane (no group): nothing can run it.
local function undelivered(prefix, lane)
  local stream = prefix .. 'stream:' .. lane
  local pending = redis.pcall('XPENDING', stream, 'w')
  if pending.err then return redis.call('XLEN', stream) end
  return redis.call('XLEN', stream) - pending[1]
end

-- Fields of an entry stand in this order everywhere: e(ncoded batch), a(ttempt), d(eadline ms), g(ateway's reply list), b(atch).
local function append(prefix, lane, batch, attempt, deadline, replies, name)
  local id = redis.call('XADD', prefix .. 'stream:' .. lane, '*',
    'e', batch, 'a', attempt, 'd', deadline, 'g', replies, 'b', name)
  local delivered = offer(prefix, lane)
  if delivered ~= id then
    redis.call('ZADD', prefix .. 'ready', 'LT', deadline, lane)
    return 0
  end
  return 1
end
