-- pass_on (worker): it cannot read a batch that it leases: another holder of the lane has it now, an idle one if there is one.
-- Where none is left that has not tried, the reply is byte 2 and the batch's name, and the gateway decides what then.
-- KEYS: stream of the lane, workers
-- ARGV: key prefix, lane, entry id, this worker, then those that could not read it before
-- returns 1: another worker has it; 0: none could read it, or it is leased by this one no more
local prefix, lane, id, worker = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local leases = redis.pcall('XPENDING', KEYS[1], 'w', id, id, 1, worker)
local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
if leases.err or #leases == 0 or not entry then return 0 end
local fields, tried, known = entry[2], {}, {}
for i = 4, #ARGV do
  tried[#tried + 1] = ARGV[i]
  known[ARGV[i]] = true
end

local chosen
for _, other in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if not known[other] and redis.call('SISMEMBER', prefix .. 'held:' .. other, lane) == 1 then
    chosen = other
    if redis.call('ZSCORE', prefix .. 'idle', other) then break end
  end
end
if chosen then
  redis.call('XCLAIM', KEYS[1], 'w', chosen, 0, id, 'JUSTID')
  redis.call('RPUSH', prefix .. 'inbox:' .. chosen, cmsgpack.pack({lane, id, fields[2], fields[4], tried}))
  redis.call('ZREM', prefix .. 'idle', chosen)
  return 1
end
redis.call('XACK', KEYS[1], 'w', id)
redis.call('XDEL', KEYS[1], id)
redis.call('RPUSH', fields[8], '\2' .. fields[10])
redis.call('EXPIRE', fields[8], 60)
return 0
