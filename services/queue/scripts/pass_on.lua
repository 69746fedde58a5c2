-- pass_on (worker): the worker cannot read a batch that it leases. Another worker that serves the lane gets the lease,
-- an idle one if there is one. When all of them have tried, the reply is byte 2 and the name of the batch, and the
-- gateway decides what to do.
-- KEYS: ready, deadlines, vtimes, idle, workers, stream of the lane
-- ARGV: prefix, lane, entry id, this worker, then workers that could not read the batch before
-- returns 1: another worker has the batch; 0: no worker can read it, or this worker has lost its lease
local STREAM = KEYS[6]
local lane, id, worker = ARGV[2], ARGV[3], ARGV[4]
local leases = redis.pcall('XPENDING', STREAM, GROUP, id, id, 1, worker)
local entry = redis.call('XRANGE', STREAM, id, id)[1]
if leases.err or #leases == 0 or not entry then return 0 end
local tried, has_tried = {}, {}
for i = 4, #ARGV do
  tried[#tried + 1] = ARGV[i]
  has_tried[ARGV[i]] = true
end

local chosen
for _, other in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
  if not has_tried[other] and redis.call('SISMEMBER', PREFIX .. 'lanes:' .. other, lane) == 1 then
    chosen = other
    if redis.call('ZSCORE', IDLE, other) then break end
  end
end
if chosen then
  local item = leased_item(lane, entry)
  item[#item + 1] = tried
  redis.call('XCLAIM', STREAM, GROUP, chosen, 0, id, 'JUSTID')
  redis.call('RPUSH', PREFIX .. 'inbox:' .. chosen, cmsgpack.pack(item))
  redis.call('ZREM', IDLE, chosen)
  return 1
end
redis.call('XACK', STREAM, GROUP, id)
redis.call('XDEL', STREAM, id)
reply(entry[FIELDS][REPLIES], '\2' .. entry[FIELDS][NAME])
return 0
