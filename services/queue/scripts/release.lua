-- release (worker): the worker runs this lane no more; the last holder takes an empty stream with it.
-- KEYS: lanes the worker holds, stream of the lane, workers, ready
-- ARGV: key prefix, worker, lane
-- returns 1 when the stream is gone
redis.call('SREM', KEYS[1], ARGV[3])
for _, other in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if redis.call('SISMEMBER', ARGV[1] .. 'held:' .. other, ARGV[3]) == 1 then return 0 end
end
if redis.call('XLEN', KEYS[2]) > 0 then return 0 end
redis.call('ZREM', KEYS[4], ARGV[3])
return redis.call('DEL', KEYS[2])
