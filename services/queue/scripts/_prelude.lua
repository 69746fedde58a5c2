-- Shared by the scripts that move batches. Their caller is the only one at work: Redis runs one script at a time.
-- A lane's stream has one group, "w"; its consumers are the workers. Fields of an entry stand in this order everywhere:
-- e(ncoded batch), a(ttempt), d(eadline ms), g(ateway's reply list), b(atch), c(ost: ms that it runs), f(ill: its part of
-- a full run, 1 and more: nothing fits beside it).
local PAGE = 32
local FORSAKEN_S = 3660 -- no deadline is further away than an hour

-- lease(stream, worker, count) -> the next undelivered entries, now leased by the worker.
-- The group is made where it is missing: a Redis that evicts keys may have taken the stream with it.
local function lease(stream, worker, count)
  local got = redis.pcall('XREADGROUP', 'GROUP', 'w', worker, 'COUNT', count, 'STREAMS', stream, '>')
  if got and got.err then
    redis.call('XGROUP', 'CREATE', stream, 'w', '0', 'MKSTREAM')
    redis.call('PERSIST', stream)
    got = redis.call('XREADGROUP', 'GROUP', 'w', worker, 'COUNT', count, 'STREAMS', stream, '>')
  end
  return got and got[1][2] or {}
end

-- Put a leased entry into a worker's inbox.
local function push_inbox(prefix, worker, lane, entry)
  redis.call('RPUSH', prefix .. 'inbox:' .. worker, cmsgpack.pack({lane, entry[1], entry[2][2], entry[2][4]}))
end

-- deliver(prefix, lane, worker) -> id of the entry that lies in the worker's inbox now, or nil. It is idle no more.
local function deliver(prefix, lane, worker)
  local entry = lease(prefix .. 'stream:' .. lane, worker, 1)[1]
  if not entry then return nil end
  push_inbox(prefix, worker, lane, entry)
  redis.call('ZREM', prefix .. 'idle', worker)
  return entry[1]
end

-- offer(prefix, lane) -> id of the entry that an idle worker got, or nil when no idle worker holds the lane.
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

-- How many entries of a lane no worker has yet; all of them when nobody ever held it (no group).
local function undelivered(prefix, lane)
  local stream = prefix .. 'stream:' .. lane
  local pending = redis.pcall('XPENDING', stream, 'w')
  if pending.err then return redis.call('XLEN', stream) end
  return redis.call('XLEN', stream) - pending[1]
end

-- mark_ready(prefix, lane, deadline): the lane has an undelivered entry with this deadline. What it ran before is not forgotten.
local function mark_ready(prefix, lane, deadline)
  local deadlines = prefix .. 'deadlines'
  if redis.call('HSETNX', deadlines, lane, deadline) == 1 then
    local tags = redis.call('ZMSCORE', prefix .. 'shares', '', lane)
    redis.call('ZADD', prefix .. 'ready', math.max(tonumber(tags[1] or 0), tonumber(tags[2] or 0)), lane)
  elseif tonumber(deadline) < tonumber(redis.call('HGET', deadlines, lane)) then
    redis.call('HSET', deadlines, lane, deadline)
  end
end

-- unmark_ready(prefix, lane): it has none.
local function unmark_ready(prefix, lane)
  redis.call('ZREM', prefix .. 'ready', lane)
  redis.call('HDEL', prefix .. 'deadlines', lane)
end

-- append(…) -> 1: an idle worker has the batch; 0: it waits in the stream.
local function append(prefix, lane, batch, attempt, deadline, replies, name, cost, fill)
  local stream = prefix .. 'stream:' .. lane
  local fields = {'*', 'e', batch, 'a', attempt, 'd', deadline, 'g', replies, 'b', name, 'c', cost, 'f', fill}
  local id = redis.call('XADD', stream, 'NOMKSTREAM', unpack(fields))
  if not id then -- whoever holds a lane makes its stream: nobody holds this one, and perhaps nobody will
    id = redis.call('XADD', stream, unpack(fields))
    redis.call('EXPIRE', stream, FORSAKEN_S)
  end
  if offer(prefix, lane) == id then return 1 end
  mark_ready(prefix, lane, deadline)
  return 0
end

-- held_by_any(prefix, lane) -> whether a worker can run the lane.
local function held_by_any(prefix, lane)
  for _, worker in ipairs(redis.call('ZRANGE', prefix .. 'workers', 0, -1)) do
    if redis.call('SISMEMBER', prefix .. 'held:' .. worker, lane) == 1 then return true end
  end
  return false
end

-- drop_if_unused(prefix, lane) -> 1 when the stream is gone. Call it after a worker held the lane for the last time: if that
-- was its last holder, an empty stream goes at once, and one with batches when no deadline can be left in it.
local function drop_if_unused(prefix, lane)
  if held_by_any(prefix, lane) then return 0 end
  local stream = prefix .. 'stream:' .. lane
  if redis.call('XLEN', stream) > 0 then
    redis.call('EXPIRE', stream, FORSAKEN_S)
    return 0
  end
  unmark_ready(prefix, lane)
  redis.call('DEL', stream)
  return 1
end

-- The Redis clock in milliseconds.
local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
