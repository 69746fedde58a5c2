-- next (worker): send replies and acknowledge what is finished, then lease what is most urgent, else become idle.
-- KEYS: ready, idle, inbox of the worker, lanes it holds, workers, shares, deadlines
-- ARGV: key prefix, worker, batches in hand, most entries wanted (0: reply only, ask for nothing),
--       1: leave entries in the inbox, on which the worker blocks next; 0: return them, number finished,
--       then for each finished: lane, entry id, reply list, reply, blob key or '', key of the reply's blob or ''
-- returns a list of packed entries (from the inbox) or of {lane, id, batch, attempt} (from a stream), or how many lie
-- in the inbox; none: idle now
-- A lease that was lost (reclaimed after a freeze) acknowledges nothing: its reply is dropped, another run answers.
local FORGET_MS = 1000
local prefix, worker, wanted, leave = ARGV[1], ARGV[2], tonumber(ARGV[4]), ARGV[5] == '1'
local k = 7
for _ = 1, tonumber(ARGV[6]) do
  local stream = prefix .. 'stream:' .. ARGV[k]
  if redis.call('XACK', stream, 'w', ARGV[k + 1]) == 1 then
    redis.call('RPUSH', ARGV[k + 2], ARGV[k + 3])
    redis.call('EXPIRE', ARGV[k + 2], 60)
    redis.call('XDEL', stream, ARGV[k + 1])
    if ARGV[k + 4] ~= '' then redis.call('DEL', ARGV[k + 4]) end
  elseif ARGV[k + 5] ~= '' then
    redis.call('DEL', ARGV[k + 5])
  end
  k = k + 6
end
if wanted == 0 then
  redis.call('ZREM', KEYS[2], worker)
  return {}
end

if leave then
  local waiting = redis.call('LLEN', KEYS[3])
  if waiting > 0 then return waiting end
else
  local waiting = redis.call('LPOP', KEYS[3], wanted)
  if waiting then return waiting end
end

-- choose() -> the lane whose turn it is, the virtual time at its turn and the one before; nil: no ready lane is held.
-- Workers are shared by time (start-time fair queueing, Goyal et al. 1996): a run moves the tag of its lane on by what it
-- costs, and the lane with the least tag is next. The virtual time, kept in `shares` under the name '', is the tag of the
-- last lane that was next; lanes behind it count as it: who did not ask saved nothing. Of those, and of others of the same
-- tag, the earliest deadline comes first. When nothing waits, all begin anew.
local function choose()
  local start = 0
  while true do
    local page = redis.call('ZRANGE', KEYS[1], start, start + PAGE - 1, 'WITHSCORES')
    if #page == 0 then
      if start == 0 then redis.call('DEL', KEYS[6]) end
      return nil
    end
    start = start + PAGE
    local lanes, tags = {}, {}
    for i = 1, #page, 2 do lanes[#lanes + 1], tags[#tags + 1] = page[i], tonumber(page[i + 1]) end
    local held = redis.call('SMISMEMBER', KEYS[4], unpack(lanes))
    local even, before, now = {}, nil, nil
    for i, lane in ipairs(lanes) do
      if held[i] == 1 then
        if not now then
          before = tonumber(redis.call('ZSCORE', KEYS[6], '') or 0)
          now = math.max(before, tags[i])
        end
        if tags[i] > now then break end
        even[#even + 1] = lane
      end
    end
    if #even == 1 then return even[1], now, before end
    if #even > 1 then
      local chosen, deadlines = 1, redis.call('HMGET', KEYS[7], unpack(even))
      for i = 2, #even do
        if tonumber(deadlines[i]) < tonumber(deadlines[chosen]) then chosen = i end
      end
      return even[chosen], now, before
    end
  end
end

-- take(lane) -> entries from the front of a lane, leased now: one, and as many more as fit into one run with it; and how
-- many waited.
local function take(lane)
  local stream = prefix .. 'stream:' .. lane
  local left = undelivered(prefix, lane)
  local got = lease(stream, worker, 1)
  if left < 2 or #got == 0 then return got, left end
  -- A fair part of what waits: what one worker holds in hand, no other can run.
  local most = math.min(wanted, math.ceil(left / math.max(1, redis.call('ZCARD', KEYS[5])))) - 1
  local fill = tonumber(got[1][2][14] or 1)
  local fitting = fill > 0 and math.floor((1 - fill) / fill) or most
  if math.min(most, fitting) > 0 then
    for _, entry in ipairs(lease(stream, worker, math.min(most, fitting))) do got[#got + 1] = entry end
  end
  return got, left
end

-- advance_vtime(lane, got, left, now, before): what it leases now moves the lane's tag on.
local function advance_vtime(lane, got, left, now, before)
  local tag = now
  for _, entry in ipairs(got) do tag = tag + tonumber(entry[2][12] or 1) end
  if #got < left then
    redis.call('ZADD', KEYS[1], tag, lane)
    -- A stream is first in, first out: the entry behind is hardly more urgent than the last one taken.
    redis.call('HSET', KEYS[7], lane, got[#got][2][6])
    if now > before then redis.call('ZADD', KEYS[6], now, '') end
  else
    unmark_ready(prefix, lane)
    redis.call('ZADD', KEYS[6], now, '', tag, lane)
  end
  if math.floor(now / FORGET_MS) > math.floor(before / FORGET_MS) then -- tags before the virtual time say nothing
    redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', string.format('(%.17g', now))
  end
end

local lane, now, before = choose()
while lane do
  local got, left = take(lane)
  if #got > 0 then
    advance_vtime(lane, got, left, now, before)
    redis.call('ZREM', KEYS[2], worker)
    for i, entry in ipairs(got) do
      if leave then push_inbox(prefix, worker, lane, entry)
      else got[i] = {lane, entry[1], entry[2][2], entry[2][4]} end
    end
    return leave and #got or got
  end
  unmark_ready(prefix, lane)
  lane, now, before = choose()
end
redis.call('ZADD', KEYS[2], ARGV[3], worker)
if not redis.call('ZSCORE', KEYS[5], worker) then -- new, or reclaimed: it may be gone again before its next beat
  redis.call('ZADD', KEYS[5], clock(), worker)
end
return leave and 0 or {}
