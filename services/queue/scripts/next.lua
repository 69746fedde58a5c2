-- next (worker): send replies and acknowledge what is finished, then lease what is most urgent, else become idle.
-- KEYS: ready, idle, inbox of the worker, lanes it holds, workers, shares
-- ARGV: key prefix, worker, batches in hand, most entries wanted (0: reply only, ask for nothing),
--       1: leave entries in the inbox, on which the worker blocks next; 0: return them, number finished,
--       then for each finished: lane, entry id, reply list, reply, blob key or ''
-- returns a list of packed entries (from the inbox) or of {lane, id, batch, attempt} (from a stream), or how many lie
-- in the inbox; none: idle now
-- A lease that was lost (reclaimed after a freeze) acknowledges nothing: its reply is dropped, another run answers.
local prefix, worker, wanted, leave = ARGV[1], ARGV[2], tonumber(ARGV[4]), ARGV[5] == '1'
local k = 7
for _ = 1, tonumber(ARGV[6]) do
  local stream = prefix .. 'stream:' .. ARGV[k]
  if redis.call('XACK', stream, 'w', ARGV[k + 1]) == 1 then
    redis.call('RPUSH', ARGV[k + 2], ARGV[k + 3])
    redis.call('EXPIRE', ARGV[k + 2], 60)
    redis.call('XDEL', stream, ARGV[k + 1])
    if ARGV[k + 4] ~= '' then redis.call('DEL', ARGV[k + 4]) end
  end
  k = k + 5
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

-- choose() -> the lane whose turn it is, and its tag; nil when no ready lane is held.
-- Workers are shared by time (start-time fair queueing, Goyal et al. 1996): a run moves its lane's tag on by what it
-- costs, and of lanes that wait none is served that had more than another. The virtual time, kept beside the tags under
-- the name '', is the tag of the last lane served out of need; tags before it count as it: who did not ask saved nothing.
-- Among lanes that are not ahead of it, the earliest deadline comes first.
local function choose()
  local start = 0
  while true do
    local lanes = redis.call('ZRANGE', KEYS[1], start, start + PAGE - 1)
    if #lanes == 0 then return nil end
    start = start + PAGE
    local held = redis.call('SMISMEMBER', KEYS[4], unpack(lanes))
    local tags = redis.call('ZMSCORE', KEYS[6], '', unpack(lanes))
    local now = tonumber(tags[1] or 0)
    local chosen, least
    for i, lane in ipairs(lanes) do
      if held[i] == 1 then
        local tag = tonumber(tags[i + 1] or 0)
        if tag <= now then return lane, now end
        if not least or tag < least then chosen, least = lane, tag end
      end
    end
    if chosen then
      redis.call('ZADD', KEYS[6], least, '')
      redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', string.format('(%.17g', least)) -- they say nothing any more
      return chosen, least
    end
  end
end

-- take(lane) -> entries from the front of a lane, leased now: one, and as many more as fit into one run with it.
local function take(lane)
  local stream = prefix .. 'stream:' .. lane
  local left = undelivered(prefix, lane)
  local got = lease(stream, worker, 1)
  if #got == 0 then return got, left end
  -- A fair part of what waits: what one worker holds in hand, no other can run.
  local most = math.min(wanted, math.ceil(left / math.max(1, redis.call('ZCARD', KEYS[5])))) - 1
  local fill = tonumber(got[1][2][14] or 1)
  local fitting = fill > 0 and math.floor((1 - fill) / fill) or most
  if math.min(most, fitting) > 0 then
    for _, entry in ipairs(lease(stream, worker, math.min(most, fitting))) do got[#got + 1] = entry end
  end
  return got, left
end

local lane, tag = choose()
while lane do
  local got, left = take(lane)
  if #got > 0 and #got < left then
    -- A stream is first in, first out: the entry behind is hardly more urgent than the last one taken.
    redis.call('ZADD', KEYS[1], got[#got][2][6], lane)
  else
    redis.call('ZREM', KEYS[1], lane)
  end
  if #got > 0 then
    for _, entry in ipairs(got) do tag = tag + tonumber(entry[2][12] or 1) end
    redis.call('ZADD', KEYS[6], tag, lane)
    redis.call('ZREM', KEYS[2], worker)
    for i, entry in ipairs(got) do
      if leave then hand_over(prefix, worker, lane, entry)
      else got[i] = {lane, entry[1], entry[2][2], entry[2][4]} end
    end
    return leave and #got or got
  end
  lane, tag = choose()
end
redis.call('ZADD', KEYS[2], ARGV[3], worker)
if not redis.call('ZSCORE', KEYS[5], worker) then -- new, or reclaimed: it may be gone again before its next beat
  redis.call('ZADD', KEYS[5], clock(), worker)
end
return leave and 0 or {}
