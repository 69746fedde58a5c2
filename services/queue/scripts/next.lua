-- next (worker): send replies and acknowledge what is finished, then lease what is most urgent, else become idle.
-- KEYS: ready, idle, inbox of the worker, lanes it holds, workers
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

local start = 0
while true do
  local lanes = redis.call('ZRANGE', KEYS[1], start, start + 63)
  if #lanes == 0 then break end
  start = start + 64
  local held = redis.call('SMISMEMBER', KEYS[4], unpack(lanes))
  for i, lane in ipairs(lanes) do
    if held[i] == 1 then
      local left = undelivered(prefix, lane)
      -- A fair part of what waits: what one worker holds in hand, no other can run.
      local share = math.ceil(left / math.max(1, redis.call('ZCARD', KEYS[5])))
      local got = lease(prefix .. 'stream:' .. lane, worker, math.max(1, math.min(wanted, share)))
      if #got > 0 then
        if #got < left then
          -- A stream is first in, first out: the entry behind is hardly more urgent than the last one taken.
          redis.call('ZADD', KEYS[1], got[#got][2][6], lane)
        else
          redis.call('ZREM', KEYS[1], lane)
        end
        redis.call('ZREM', KEYS[2], worker)
        for j, entry in ipairs(got) do
          if leave then hand_over(prefix, worker, lane, entry)
          else got[j] = {lane, entry[1], entry[2][2], entry[2][4]} end
        end
        return leave and #got or got
      end
      redis.call('ZREM', KEYS[1], lane)
      start = start - 1
    end
  end
end
redis.call('ZADD', KEYS[2], ARGV[3], worker)
if not redis.call('ZSCORE', KEYS[5], worker) then -- new, or reclaimed: it may be gone again before its next beat
  redis.call('ZADD', KEYS[5], clock(), worker)
end
return leave and 0 or {}
