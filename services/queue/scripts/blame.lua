-- blame (gateway): count that a version ended a worker, or that a run of it had to be ended; one that goes on like this is
-- refused for a while, each time for longer.
-- KEYS: blamed versions, what this is about
-- ARGV: key prefix, release; '': count nothing
-- returns {1 if it was counted, else 0; then for each version that is refused: {release, deaths of late, ms to go}}
-- The count halves every minute. Five refuse the version for ten seconds; while that is remembered one more is enough, and
-- each time lasts twice as long. One time is forgotten for every ten minutes in which it was not refused.
local HALF_LIFE_MS, LIMIT, FIRST_MS, MOST_MS, FORGET_MS = 60000, 5, 10000, 600000, 600000
local now, counted = clock(), 0

-- record(text) -> count, as of when, times that it was refused, until when
local function record(text)
  local count, at, times, till = string.match(text or '', '(%S+) (%S+) (%S+) (%S+)')
  if not count then return 0, now, 0, now end
  return tonumber(count) * 0.5 ^ ((now - at) / HALF_LIFE_MS), now,
    math.max(0, times - math.floor(math.max(0, now - till) / FORGET_MS)), tonumber(till)
end

if ARGV[2] ~= '' and redis.call('SET', KEYS[2], 1, 'NX', 'PX', FORGET_MS) then
  counted = 1
  local count, _, times, till = record(redis.call('HGET', KEYS[1], ARGV[2]))
  count = count + 1
  if now >= till and (count > LIMIT - 0.5 or times > 0) then -- five that come in seconds are five
    times = times + 1
    till = now + math.min(MOST_MS, FIRST_MS * 2 ^ (times - 1))
  end
  redis.call('HSET', KEYS[1], ARGV[2], string.format('%.3f %d %d %d', count, now, times, till))
end

local found, all = {counted}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local count, _, times, till = record(all[i + 1])
  if till > now then
    found[#found + 1] = {all[i], math.ceil(count), till - now}
  elseif times == 0 and count < 0.1 then
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return found
