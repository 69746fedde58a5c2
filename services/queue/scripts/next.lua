-- next (worker): send replies and acknowledge finished batches; then lease the most urgent ones, else become idle.
-- KEYS: ready, deadlines, vtimes, idle, workers, inbox of the worker, lanes that it serves
-- ARGV: prefix, worker, batches that it leases already, most entries wanted (0: reply only, lease nothing; -1: the same
--       beside the worker's main loop, which alone decides whether the worker is idle),
--       1: leave entries in the inbox, on which the worker blocks next; 0: return them, number of finished batches,
--       then for each of them: lane, entry id, reply list, reply ('': its gateway has it already), blob key or '',
--       key of the reply's blob or ''; then for lanes whose runs took time that they were not charged for: lane, this
--       time (ms), how long the lane counts as one with long runs (ms; 0: none was long)
-- returns a list of packed entries (from the inbox) or of {lane, id, batch, attempt} (from a stream), or the number
-- of entries in the inbox; empty or 0: the worker is idle now
-- If a lease was lost (reclaimed while the worker was frozen), nothing is acknowledged and the reply is dropped:
-- another worker runs the batch and answers.
local INBOX, LANES = KEYS[6], KEYS[7]
local worker, leased_already, wanted, leave, finished = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6]
local FORGET_MS = 1000 -- of virtual time, after which lanes that are behind it are removed from vtimes
local FIRST_FINISHED, FINISHED_ARGS = 7, 6
local known = false -- whether gateways know the worker: one that was reclaimed leases nothing
for i = 0, tonumber(finished) - 1 do
  local first = FIRST_FINISHED + i * FINISHED_ARGS
  local lane, id, replies, data, blob, reply_blob = unpack(ARGV, first, first + FINISHED_ARGS - 1)
  local stream = PREFIX .. 'stream:' .. lane
  if redis.call('XACK', stream, GROUP, id) == 1 then
    known = true
    if data ~= '' then reply(replies, data) end
    redis.call('XDEL', stream, id)
    if blob ~= '' then redis.call('DEL', blob) end
  elseif reply_blob ~= '' then
    redis.call('DEL', reply_blob)
  end
end
local first_used = FIRST_FINISHED + finished * FINISHED_ARGS
for i = first_used, #ARGV, 3 do
  local lane, ms, long_ms = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  note_called(lane)
  if ms > 0 then charge(lane, ms) end
  if long_ms > 0 then note_long(lane, long_ms) end
end
if wanted <= 0 then
  if wanted == 0 then redis.call('ZREM', IDLE, worker) end
  return {}
end

local any_held = redis.call('EXISTS', PREFIX .. 'held') == 1
if any_held then redis.call('HDEL', PREFIX .. 'held', worker) end -- a worker that asks for work is in no long run
if leave then
  local waiting = redis.call('LLEN', INBOX)
  if waiting > 0 then return waiting end
else
  local waiting = redis.call('LPOP', INBOX, wanted)
  if waiting then return waiting end
end

-- may_take(lane) -> whether a lane with long runs may have the worker now. Of more than PAGE such lanes that may not,
-- the others are not asked about.
local may, refused = nil, 0
local function may_take(lane)
  may = may or reserve(worker)
  local taken = refused < PAGE and may(lane)
  if not taken then refused = refused + 1 end
  return taken
end

-- choose() -> the lane to run next, the pool's virtual time then, and the virtual time before; nil: the worker may have
-- no ready lane. `long_lanes` has the lanes with long runs that were looked at.
-- Lanes share the workers by time (start-time fair queueing, Goyal et al. 1996): a run advances the virtual time of its
-- lane by its cost, and the lane with the least virtual time is next. The pool's virtual time, kept in `vtimes` under
-- the name '', is that of the lane that was chosen last. A lane behind it counts as equal to it: a lane gains no credit
-- by being idle. Among lanes with equal virtual time the one with the earliest deadline is first. When no
-- batch waits, and no long run is under way, all virtual times start at 0 again.
local long_lanes = {}
local function choose()
  local start = 0
  while true do
    local page = redis.call('ZRANGE', READY, start, start + PAGE - 1, 'WITHSCORES')
    if #page == 0 then
      if start == 0 and not (any_held and redis.call('EXISTS', PREFIX .. 'held') == 1) then redis.call('DEL', VTIMES) end
      return nil
    end
    start = start + PAGE
    local lanes, vtimes = {}, {}
    for i = 1, #page, 2 do lanes[#lanes + 1], vtimes[#vtimes + 1] = page[i], tonumber(page[i + 1]) end
    local served = redis.call('SMISMEMBER', LANES, unpack(lanes))
    local long, at = redis.call('ZMSCORE', PREFIX .. 'long', unpack(lanes)), nil
    local ties, before, now = {}, nil, nil
    for i, lane in ipairs(lanes) do
      if long[i] then
        at = at or clock()
        long[i] = tonumber(long[i]) > at
        if long[i] then long_lanes[lane] = true end
      end
      if served[i] == 1 and not (now and vtimes[i] > now) and (not long[i] or may_take(lane)) then
        if not now then
          before = tonumber(redis.call('ZSCORE', VTIMES, '') or 0)
          now = math.max(before, vtimes[i])
        end
        ties[#ties + 1] = lane
      end
    end
    if #ties == 1 then return ties[1], now, before end
    if #ties > 1 then
      local chosen, deadlines = 1, redis.call('HMGET', DEADLINES, unpack(ties))
      for i = 2, #ties do
        if tonumber(deadlines[i]) < tonumber(deadlines[chosen]) then chosen = i end
      end
      return ties[chosen], now, before
    end
  end
end

-- take(lane) -> entries from the front of a lane, leased now: one entry and those that fit into one run with it; and
-- the number of entries that waited.
local function take(lane)
  local stream = PREFIX .. 'stream:' .. lane
  local left = undelivered(lane)
  local got = lease(stream, worker, 1)
  if left < 2 or #got == 0 then return got, left end
  -- At most a fair part of what waits: no other worker can run what this one leases.
  local most = math.min(wanted, math.ceil(left / math.max(1, redis.call('ZCARD', WORKERS)))) - 1
  local fill = tonumber(got[1][FIELDS][FILL] or 1)
  local fitting = fill > 0 and math.floor((1 - fill) / fill) or most
  if math.min(most, fitting) > 0 then
    for _, entry in ipairs(lease(stream, worker, math.min(most, fitting))) do got[#got + 1] = entry end
  end
  return got, left
end

-- advance_vtime(lane, got, left, now, before): advance the lane's virtual time by the cost of the entries leased now.
local function advance_vtime(lane, got, left, now, before)
  local vtime = now
  for _, entry in ipairs(got) do vtime = vtime + tonumber(entry[FIELDS][COST] or 1) end
  if #got < left then
    redis.call('ZADD', READY, vtime, lane)
    -- A stream is first in, first out: the next entry is hardly more urgent than the last one that was leased.
    redis.call('HSET', DEADLINES, lane, got[#got][FIELDS][DEADLINE])
    if now > before then redis.call('ZADD', VTIMES, now, '') end
  else
    unmark_ready(lane)
    redis.call('ZADD', VTIMES, now, '', vtime, lane)
  end
  if math.floor(now / FORGET_MS) > math.floor(before / FORGET_MS) then -- these lanes count as equal to '' anyway
    redis.call('ZREMRANGEBYSCORE', VTIMES, '-inf', string.format('(%.17g', now))
  end
end

local lane, now, before = choose()
while lane do
  local got, left = take(lane)
  if #got > 0 then
    advance_vtime(lane, got, left, now, before)
    redis.call('ZREM', IDLE, worker)
    if long_lanes[lane] then note_held(worker, lane) end
    for i, entry in ipairs(got) do
      if leave then push_inbox(worker, lane, entry) else got[i] = leased_item(lane, entry) end
    end
    return leave and #got or got
  end
  unmark_ready(lane)
  lane, now, before = choose()
end
redis.call('ZADD', IDLE, leased_already, worker)
if not known and not redis.call('ZSCORE', WORKERS, worker) then -- new, or reclaimed: it might die before its next beat
  redis.call('ZADD', WORKERS, clock(), worker)
end
return leave and 0 or {}
