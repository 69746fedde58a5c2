-- The names and functions that the scripts of a pool share. A Redis script cannot call another, so the loader puts the
-- names, and the functions that a script uses, before that script: every definition costs time in each call.
-- KEYS: ready, deadlines, vtimes, idle, workers; a script's own keys follow from KEYS[6]
-- ARGV: prefix of the pool's keys; a script's own arguments follow from ARGV[2]
-- Redis runs one script at a time, so a script sees no changes except its own.
-- A script finds out while it runs which streams and workers it uses. Their keys are built from the prefix, which
-- contains the pool's hash tag: on a cluster all of them are in the slot of KEYS.
local READY, DEADLINES, VTIMES, IDLE, WORKERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PREFIX = ARGV[1]

-- A stream entry is {id, {name, value, ...}}. Its fields are always in this order: e (encoded batch), a (attempt),
-- d (deadline, ms), g (the gateway's reply list), b (name of the batch), c (cost: expected run time, ms), f (fill: its
-- share of a full run; with 1 or more no other batch fits into the run). These are the positions of their values.
local ID, FIELDS = 1, 2
local BATCH, ATTEMPT, DEADLINE, REPLIES, NAME, COST, FILL = 2, 4, 6, 8, 10, 12, 14
local GROUP = 'w' -- a lane's stream has one consumer group, whose consumers are the workers

local PAGE = 32 -- members of a sorted set that are read at a time
local REPLIES_LIFE_S = 60 -- a reply list expires when its gateway has not read it for this time
local UNSERVED_LIFE_S = 3660 -- lifetime of a stream that no worker serves; longer than the longest deadline, an hour
local CHARGED_MS = 1 -- expected run time of a delivered entry from which on its lane is charged for it
local LONG_LIFE_MS_MAX = 60000 -- for which a lane counts as one with long runs at most (queue/sharing.py)
local UNPROVEN_LIFE_MS = 1000 -- for which a new lane counts as such; it is left a worker as one with short runs
local CALLED_LIFE_MS = 10000 -- for which a lane counts as called after its last call
local HELD_LIFE_MS = 10000 -- of the notes of long runs after the last report of one

-- clock() -> milliseconds on the Redis clock
local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- lease(stream, worker, count) -> the next undelivered entries, now leased by the worker.
-- Creates the group if it is missing: a Redis that evicts keys may have evicted the stream with its group.
local function lease(stream, worker, count)
  local got = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS', stream, '>')
  if got and got.err then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    redis.call('PERSIST', stream)
    got = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS', stream, '>')
  end
  return got and got[1][2] or {}
end

-- leased_item(lane, entry) -> {lane, id, batch, attempt}: a leased entry as a worker reads it
local function leased_item(lane, entry)
  return {lane, entry[ID], entry[FIELDS][BATCH], entry[FIELDS][ATTEMPT]}
end

-- push_inbox(worker, lane, entry): put a leased entry into a worker's inbox.
local function push_inbox(worker, lane, entry)
  redis.call('RPUSH', PREFIX .. 'inbox:' .. worker, cmsgpack.pack(leased_item(lane, entry)))
end

-- charge(lane, ms): advance the virtual time of a lane by run time. A lane behind the pool's counts as equal to it.
local function charge(lane, ms)
  local ready, vtimes = redis.call('ZSCORE', READY, lane), redis.call('ZMSCORE', VTIMES, '', lane)
  local vtime = math.max(tonumber(ready or 0), tonumber(vtimes[1] or 0), tonumber(vtimes[2] or 0)) + ms
  redis.call('ZADD', ready and READY or VTIMES, vtime, lane)
end

-- is_long(lane) -> whether the lane counts as one with long runs
local function is_long(lane)
  local till = redis.call('ZSCORE', PREFIX .. 'long', lane)
  return till and tonumber(till) > clock()
end

-- note_called(lane): the lane was called just now. Lanes with long runs have a list of their own, because any number of
-- them may wait, and only the latest of a list are looked at.
local function note_called(lane)
  local key, now = PREFIX .. (is_long(lane) and 'called_long' or 'called'), clock()
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - CALLED_LIFE_MS)
  redis.call('ZADD', key, now, lane)
  redis.call('PEXPIRE', key, CALLED_LIFE_MS)
end

-- called(worker, life_ms) -> lanes that the worker serves and that were called within this time, of the latest PAGE of
-- each list
local function called(worker, life_ms)
  local since, found = clock() - life_ms, {}
  for _, key in ipairs({PREFIX .. 'called', PREFIX .. 'called_long'}) do
    local lanes = redis.call('ZRANGE', key, '+inf', since, 'BYSCORE', 'REV', 'LIMIT', 0, PAGE)
    local served = #lanes > 0 and redis.call('SMISMEMBER', PREFIX .. 'lanes:' .. worker, unpack(lanes))
    for i, lane in ipairs(lanes) do
      if served[i] == 1 then found[#found + 1] = lane end
    end
  end
  return found
end

-- note_long(lane, life_ms): the lane counts as one with long runs for this time.
local function note_long(lane, life_ms)
  local key, now = PREFIX .. 'long', clock()
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  redis.call('ZADD', key, 'GT', now + life_ms, lane)
  redis.call('PEXPIRE', key, LONG_LIFE_MS_MAX)
end

-- note_held(worker, lane): the worker has a batch of a lane with long runs. It is over when the worker asks for work.
local function note_held(worker, lane)
  redis.call('HSET', PREFIX .. 'held', worker, lane)
  redis.call('PEXPIRE', PREFIX .. 'held', HELD_LIFE_MS)
end

-- reserve(worker) -> a function that tells whether a lane with long runs may have the worker now.
-- It may not have the last worker on which another lane, which was called lately, would not have to wait for it: for a
-- lane with short runs, the last one without any long run; for another lane with long runs, the last one without this
-- lane's. So one lane holds all workers but one at most, and so do all lanes with long runs together beside a lane with
-- short runs. A lane that no other worker serves may always have its only worker.
local function reserve(worker)
  local others, peers, held, long = called(worker, CALLED_LIFE_MS), nil, nil, nil
  return function(lane)
    if #others == 0 then return true end
    if not peers then
      peers, held, long = redis.call('ZRANGE', WORKERS, 0, -1), {}, {}
      local holds = redis.call('HGETALL', PREFIX .. 'held')
      local till = redis.call('ZMSCORE', PREFIX .. 'long', unpack(others))
      for i = 1, #holds, 2 do held[holds[i]] = holds[i + 1] end
      for i, other in ipairs(others) do long[other] = till[i] and tonumber(till[i]) > clock() + UNPROVEN_LIFE_MS end
    end
    local waiting, elsewhere = {}, false
    for _, other in ipairs(others) do waiting[other] = other ~= lane or nil end
    for _, peer in ipairs(peers) do
      local serves = peer ~= worker and redis.call('SMISMEMBER', PREFIX .. 'lanes:' .. peer, lane, unpack(others))
      elsewhere = elsewhere or serves and serves[1] == 1
      for i = 1, serves and #others or 0 do
        local other = others[i]
        local free = not held[peer] or (long[other] and held[peer] ~= lane)
        if free and serves[i + 1] == 1 then waiting[other] = nil end
      end
    end
    return not elsewhere or next(waiting) == nil
  end
end

-- deliver(lane, worker, long) -> id of the entry that was put into the worker's inbox, or nil. The worker is no longer
-- idle. `long`: the lane counts as one with long runs.
local function deliver(lane, worker, long)
  local entry = lease(PREFIX .. 'stream:' .. lane, worker, 1)[1]
  if not entry then return nil end
  push_inbox(worker, lane, entry)
  redis.call('ZREM', IDLE, worker)
  if long then note_held(worker, lane) end
  local cost = tonumber(entry[FIELDS][COST] or 1)
  if cost >= CHARGED_MS then charge(lane, cost) end
  return entry[ID]
end

-- offer(lane) -> id of the entry that an idle worker got, or nil when no idle worker may have the lane; and whether the
-- worker is attached, and so may be inside a run.
local function offer(lane)
  local start, long = 0, nil
  while true do
    local idle = redis.call('ZRANGE', IDLE, start, start + PAGE - 1, 'WITHSCORES')
    for i = 1, #idle, 2 do
      local worker = idle[i]
      if redis.call('SISMEMBER', PREFIX .. 'lanes:' .. worker, lane) == 1 then
        if long == nil then long = is_long(lane) or false end
        if not long or reserve(worker)(lane) then return deliver(lane, worker, long), idle[i + 1] ~= '0' end
      end
    end
    if #idle < 2 * PAGE then return nil end
    start = start + PAGE
  end
end

-- undelivered(lane) -> number of entries of a lane that no worker leases. Without a group it is all of them, because no
-- worker ever served the lane.
local function undelivered(lane)
  local stream = PREFIX .. 'stream:' .. lane
  local pending = redis.pcall('XPENDING', stream, GROUP)
  if pending.err then return redis.call('XLEN', stream) end
  return redis.call('XLEN', stream) - pending[1]
end

-- mark_ready(lane, deadline): the lane has an undelivered entry with this deadline. Its virtual time is the
-- one that its earlier runs led to, but at least the pool's.
local function mark_ready(lane, deadline)
  if redis.call('HSETNX', DEADLINES, lane, deadline) == 1 then
    local vtimes = redis.call('ZMSCORE', VTIMES, '', lane)
    redis.call('ZADD', READY, math.max(tonumber(vtimes[1] or 0), tonumber(vtimes[2] or 0)), lane)
  elseif tonumber(deadline) < tonumber(redis.call('HGET', DEADLINES, lane)) then
    redis.call('HSET', DEADLINES, lane, deadline)
  end
end

-- unmark_ready(lane): the lane has no undelivered entry.
local function unmark_ready(lane)
  redis.call('ZREM', READY, lane)
  redis.call('HDEL', DEADLINES, lane)
end

-- append(lane, batch, attempt, deadline, replies, name, cost, fill) -> 1: an idle worker has the batch; 0: it waits in
-- the stream; and whether the worker may be inside a run.
local function append(lane, batch, attempt, deadline, replies, name, cost, fill)
  local stream = PREFIX .. 'stream:' .. lane
  local fields = {'*', 'e', batch, 'a', attempt, 'd', deadline, 'g', replies, 'b', name, 'c', cost, 'f', fill}
  local id = redis.call('XADD', stream, 'NOMKSTREAM', unpack(fields))
  if not id then -- a worker creates the stream when it begins to serve a lane: no worker serves this lane now
    id = redis.call('XADD', stream, unpack(fields))
    redis.call('EXPIRE', stream, UNSERVED_LIFE_S)
  end
  local offered, attached = offer(lane)
  if offered == id then return 1, attached end
  mark_ready(lane, deadline)
  return 0
end

-- append_again(lane, fields, attempt): put a batch, whose entry was removed, at the end of its stream.
local function append_again(lane, fields, attempt)
  return append(lane, fields[BATCH], attempt, fields[DEADLINE], fields[REPLIES], fields[NAME], fields[COST] or 1,
    fields[FILL] or 1)
end

-- reply(list, data): push a reply for a gateway.
local function reply(list, data)
  redis.call('RPUSH', list, data)
  redis.call('EXPIRE', list, REPLIES_LIFE_S)
end

-- is_served(lane) -> whether any worker serves the lane
local function is_served(lane)
  for _, worker in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
    if redis.call('SISMEMBER', PREFIX .. 'lanes:' .. worker, lane) == 1 then return true end
  end
  return false
end

-- drop_if_unused(lane) -> 1 when the stream was deleted. Call it after a worker stopped serving the lane. If no
-- other worker serves it, an empty stream is deleted at once, and a stream with batches expires when all
-- their deadlines have passed.
local function drop_if_unused(lane)
  if is_served(lane) then return 0 end
  local stream = PREFIX .. 'stream:' .. lane
  if redis.call('XLEN', stream) > 0 then
    redis.call('EXPIRE', stream, UNSERVED_LIFE_S)
    return 0
  end
  unmark_ready(lane)
  redis.call('DEL', stream)
  return 1
end

-- remove_waiting(lane, id) -> 1 when the entry was removed; 0: a worker leases it.
local function remove_waiting(lane, id)
  local stream = PREFIX .. 'stream:' .. lane
  if #redis.pcall('XPENDING', stream, GROUP, id, id, 1) > 0 then return 0 end
  redis.call('XDEL', stream, id)
  if undelivered(lane) == 0 then
    unmark_ready(lane)
    drop_if_unused(lane)
  end
  return 1
end
