-- blame (gateway, worker): count that a version ended a worker, or that a run of it was terminated. A version that does
-- so repeatedly is refused for a while, each time for longer.
-- KEYS: blamed versions (hash), marker of the event that is counted
-- ARGV: version (name of its lane), '': count nothing; how much the event counts (default 1), LIMIT at most: the seconds
--       that a terminated run took from others
-- returns {1 if the event was counted, else 0; then for each refused version: {version, recent deaths, ms to go}}
-- The count halves every minute. A count of five refuses the version for ten seconds, and at least for as long as the run
-- took from others: else a run that ends at its deadline would be soon followed by the next. While a refusal is remembered,
-- one more event refuses it again, for twice as long as the time before, ten minutes at most. One refusal is forgotten
-- for every ten minutes in which the version was not refused.
local BLAMED, COUNTED = KEYS[1], KEYS[2]
local version, weight = ARGV[1], tonumber(ARGV[2] or 1)
local HALF_LIFE_MS, LIMIT, FIRST_MS, MOST_MS, FORGET_MS = 60000, 5, 10000, 600000, 600000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local counted = 0

-- decayed(text) -> count as of now, refusals that are remembered, end of the last refusal (ms), whether the clock was
-- set back since.
-- The hash stores this text: count, the time (ms) of that count, refusals, end of the last refusal.
local function decayed(text)
  local count, at, refusals, till = string.match(text or '', '(%S+) (%S+) (%S+) (%S+)')
  if not count then return 0, 0, now, false end
  local set_back = tonumber(at) > now
  if set_back then at, till = now, math.min(till, now + MOST_MS) end
  local forgotten = math.floor(math.max(0, now - till) / FORGET_MS)
  return tonumber(count) * 0.5 ^ ((now - at) / HALF_LIFE_MS), math.max(0, refusals - forgotten), tonumber(till),
    set_back
end

local function store(name, count, refusals, till)
  redis.call('HSET', BLAMED, name, string.format('%.3f %d %d %d', count, now, refusals, till))
end

if version ~= '' and redis.call('SET', COUNTED, 1, 'NX', 'PX', FORGET_MS) then
  counted = 1
  local count, refusals, till = decayed(redis.call('HGET', BLAMED, version))
  count = count + math.min(weight, LIMIT)
  if now >= till and (count > LIMIT - 0.5 or refusals > 0) then -- five events within seconds still count as five
    refusals = refusals + 1
    till = now + math.min(MOST_MS, math.max(FIRST_MS, weight * 1000) * 2 ^ (refusals - 1))
  end
  store(version, count, refusals, till)
end

local result, all = {counted}, redis.call('HGETALL', BLAMED)
for i = 1, #all, 2 do
  local name, count, refusals, till, set_back = all[i], decayed(all[i + 1])
  if set_back then store(name, count, refusals, till) end
  if till > now then
    result[#result + 1] = {name, math.ceil(count), till - now}
  elseif refusals == 0 and count < 0.1 then
    redis.call('HDEL', BLAMED, name)
  end
end
return result
