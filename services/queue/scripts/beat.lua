-- beat (worker): the worker is alive: extend its leases and its record.
-- KEYS: workers, record of the worker, lanes it holds
-- ARGV: worker, record (JSON), record's life (ms)
-- returns {known, seconds, microseconds}: Redis' clock; known: 0 when the worker must hold its lanes (again): it is new, was
-- reclaimed, or Redis lost its data; else 1
local now = redis.call('TIME')
local known = redis.call('EXISTS', KEYS[2], KEYS[3])
redis.call('ZADD', KEYS[1], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return {known == 2 and 1 or 0, now[1], now[2]}
