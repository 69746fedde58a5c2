-- reclaim (gateway; worker, of itself when it leaves): take back the leases of workers that are gone or silent.
-- KEYS: workers
-- ARGV: key prefix, lease (ms), most attempts, a worker that is gone or '', 1: it died,
--       1: it is known which batches it was running then, and their names
-- returns {workers removed, batches put again, batches given up}
-- Batches are put again. But one that a worker was running when it died, and one that was tried too often, is given up:
-- byte 1 and its name are the reply, and the gateway decides what then. Where it is not known what was running, it may
-- have been any that a worker had for the first time, or the one that it said it ran alone.
local known, ran = ARGV[6] == '1', {}
for i = 7, #ARGV do ran[ARGV[i]] = true end
local prefix, most, died = ARGV[1], tonumber(ARGV[3]), ARGV[5] == '1'
local silent = ARGV[4] ~= '' and {ARGV[4]}
  or redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. (clock() - ARGV[2]))
local lanes, alone = {}, {}
-- All of them leave before anything is put again: what one had must not be offered to another that is silent too.
for i, worker in ipairs(silent) do
  local held, drained = prefix .. 'held:' .. worker, prefix .. 'draining:' .. worker
  lanes[i] = redis.call('SUNION', held, drained)
  alone[i] = redis.call('GET', prefix .. 'running:' .. worker)
  redis.call('ZREM', prefix .. 'idle', worker)
  redis.call('ZREM', KEYS[1], worker)
  redis.call('DEL', held, drained, prefix .. 'inbox:' .. worker, prefix .. 'record:' .. worker,
    prefix .. 'running:' .. worker)
end

local again, dead = 0, 0
local function take_back(lane, fields, running)
  local attempt = tonumber(fields[4])
  local suspect = died and (attempt == 1 or running == fields[10])
  if known then suspect = ran[fields[10]] end
  if not suspect and attempt < most then
    -- Of a worker that died, but not of this one: no attempt is used up.
    append(prefix, lane, fields[2], died and attempt or attempt + 1, fields[6], fields[8], fields[10],
      fields[12] or 1, fields[14] or 1)
    again = again + 1
  else
    redis.call('RPUSH', fields[8], '\1' .. fields[10])
    redis.call('EXPIRE', fields[8], 60)
    dead = dead + 1
  end
end

for i, worker in ipairs(silent) do
  for _, lane in ipairs(lanes[i]) do
    local stream = prefix .. 'stream:' .. lane
    repeat
      local leases = redis.pcall('XPENDING', stream, 'w', '-', '+', 100, worker)
      for _, leased in ipairs(leases) do
        local entry = redis.call('XRANGE', stream, leased[1], leased[1])[1]
        redis.call('XACK', stream, 'w', leased[1])
        redis.call('XDEL', stream, leased[1])
        if entry then take_back(lane, entry[2], alone[i]) end
      end
    until #leases == 0
    redis.pcall('XGROUP', 'DELCONSUMER', stream, 'w', worker)
    drop_if_unused(prefix, lane)
  end
end

-- Streams that nobody holds expire.
for _, lane in ipairs(redis.call('ZRANGE', prefix .. 'ready', 0, 63)) do
  if redis.call('EXISTS', prefix .. 'stream:' .. lane) == 0 then unmark_ready(prefix, lane) end
end
if redis.call('EXISTS', KEYS[1], prefix .. 'ready') == 0 then redis.call('DEL', prefix .. 'shares') end
return {#silent, again, dead}
