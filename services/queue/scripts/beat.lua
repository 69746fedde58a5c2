-- beat (worker): the worker is alive: extend its leases and its record.
-- KEYS: workers, record of the worker, pools
-- ARGV: worker, record (JSON), record's life (ms), pool
-- returns 1; 0 when the worker was not known (new, reclaimed after a freeze, or Redis lost its data): hold lanes again
local now = redis.call('TIME')
local fresh = redis.call('ZADD', KEYS[1], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[4])
return 1 - fresh
