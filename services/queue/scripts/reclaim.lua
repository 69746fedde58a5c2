-- reclaim (gateway; worker, of itself when it leaves): take back the leases of workers that are gone or silent.
-- KEYS: ready, deadlines, vtimes, idle, workers
-- ARGV: prefix, lease (ms), most attempts, a worker that is gone or '' (all that are silent), 1: it died,
--       1: the batches that it was running then are known, and their names
-- returns {workers removed, batches put again, batches given up}
-- Batches are put again, except for two kinds that are given up: a batch that a worker was running when it died, and a
-- batch with too many attempts. The reply of a batch that is given up is byte 1 and its name, and the gateway decides
-- what to do. If it is not known what the worker was running, each batch that it leased for the first attempt is
-- suspect, and so is the batch that it had noted to run alone.
-- Batches that are overdue in lanes without workers are removed. Their reply is byte 2 and the name.
local lease_ms, attempts_max, gone, died, known =
  ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5] == '1', ARGV[6] == '1'
local OVERDUE_MS = 15000 -- after the earliest deadline of a batch, when its gateway has long forgotten a usual one
local OVERDUE_MAX = 8 -- entries of a lane that are looked at in one call
local ran = {}
for i = 7, #ARGV do ran[ARGV[i]] = true end
local removed = {gone}
if gone == '' then
  local now = clock()
  -- A heartbeat in the future came before the clock was set back. It counts as sent now, or else a worker that died
  -- would keep its leases until the clock reads that time again.
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', WORKERS, '(' .. now, '+inf')) do
    redis.call('ZADD', WORKERS, now, worker)
  end
  removed = redis.call('ZRANGEBYSCORE', WORKERS, '-inf', '(' .. (now - lease_ms))
end
local lanes, alone = {}, {}
-- All of them are removed before anything is put again: a batch must not be offered to another silent worker.
for i, worker in ipairs(removed) do
  local lanes_of, draining = PREFIX .. 'lanes:' .. worker, PREFIX .. 'draining:' .. worker
  local running = PREFIX .. 'running:' .. worker
  lanes[i] = redis.call('SUNION', lanes_of, draining)
  alone[i] = redis.call('GET', running)
  redis.call('ZREM', IDLE, worker)
  redis.call('ZREM', WORKERS, worker)
  redis.call('HDEL', PREFIX .. 'held', worker)
  redis.call('DEL', lanes_of, draining, running, PREFIX .. 'inbox:' .. worker, PREFIX .. 'record:' .. worker,
    PREFIX .. 'instances:' .. worker,
    PREFIX .. 'orders:' .. worker)
end
if #removed > 0 then -- other workers may be ordered to load what these were ordered to load
  local gone_workers = {}
  for _, worker in ipairs(removed) do gone_workers[worker] = true end
  local demands = redis.call('HGETALL', PREFIX .. 'demands')
  for i = 1, #demands, 2 do
    if gone_workers[string.match(demands[i + 1], '^(.*) %d+$')] then
      redis.call('HDEL', PREFIX .. 'demands', demands[i])
    end
  end
end

local again, given_up = 0, 0
local function take_back(lane, fields, running)
  local attempt, name = tonumber(fields[ATTEMPT]), fields[NAME]
  local suspect = died and (attempt == 1 or running == name)
  if known then suspect = ran[name] end
  if not suspect and attempt < attempts_max then
    append_again(lane, fields, died and attempt or attempt + 1) -- a death that it did not cause uses up no attempt
    again = again + 1
  else
    reply(fields[REPLIES], '\1' .. name)
    given_up = given_up + 1
  end
end

for i, worker in ipairs(removed) do
  for _, lane in ipairs(lanes[i]) do
    local stream = PREFIX .. 'stream:' .. lane
    repeat
      local leases = redis.pcall('XPENDING', stream, GROUP, '-', '+', 100, worker)
      for _, leased in ipairs(leases) do
        local id = leased[ID]
        local entry = redis.call('XRANGE', stream, id, id)[1]
        redis.call('XACK', stream, GROUP, id)
        redis.call('XDEL', stream, id)
        if entry then take_back(lane, entry[FIELDS], alone[i]) end
      end
    until #leases == 0
    redis.pcall('XGROUP', 'DELCONSUMER', stream, GROUP, worker)
    drop_if_unused(lane)
  end
end

-- drop_overdue(lane, now): remove overdue entries from the front of a lane that no worker serves. Their gateway could not
-- withdraw them while a worker served the lane or leased them, or it is gone. If it still waits (for a later request of
-- the batch, or because a clock was set), it puts the batch again when it gets the reply.
local function drop_overdue(lane, now)
  for _, entry in ipairs(redis.call('XRANGE', PREFIX .. 'stream:' .. lane, '-', '+', 'COUNT', OVERDUE_MAX)) do
    local fields = entry[FIELDS]
    if tonumber(fields[DEADLINE]) + OVERDUE_MS < now and remove_waiting(lane, entry[ID]) == 1 then
      reply(fields[REPLIES], '\2' .. fields[NAME])
    end
  end
end

-- A stream that no worker serves expires. Its lane is not ready then.
local now = clock()
for _, lane in ipairs(redis.call('ZRANGE', READY, 0, 63)) do
  local life_s = redis.call('TTL', PREFIX .. 'stream:' .. lane)
  if life_s == -2 then
    unmark_ready(lane)
  elseif life_s >= 0 then
    drop_overdue(lane, now)
  end
end
if redis.call('EXISTS', WORKERS, READY) == 0 then redis.call('DEL', VTIMES) end
return {#removed, again, given_up}
