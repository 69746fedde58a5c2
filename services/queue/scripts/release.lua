-- release (worker): the worker runs this lane no more; the last holder takes an empty stream with it.
-- KEYS: lanes the worker holds, lanes it drains, stream of the lane
-- ARGV: key prefix, worker, lane
-- returns 1 when the stream is gone
redis.call('SREM', KEYS[1], ARGV[3])
if #redis.pcall('XPENDING', KEYS[3], 'w', '-', '+', 1, ARGV[2]) > 0 then
  redis.call('SADD', KEYS[2], ARGV[3]) -- so that its leases are found should it die with them
else
  redis.call('SREM', KEYS[2], ARGV[3])
  redis.pcall('XGROUP', 'DELCONSUMER', KEYS[3], 'w', ARGV[2])
end
return drop_if_unused(ARGV[1], ARGV[3])
