-- beat (worker): extend the worker's leases and its record.
-- KEYS: workers, record of the worker, lanes that the worker serves
-- ARGV: worker, record (JSON), lifetime of the record (ms)
-- returns {known, seconds, microseconds}: known: 0 when the worker must add its lanes (again), because it is new, was
-- reclaimed, or Redis lost its data; else 1. Seconds and microseconds: the Redis clock
local WORKERS, RECORD, LANES = KEYS[1], KEYS[2], KEYS[3]
local worker, record, life_ms = ARGV[1], ARGV[2], ARGV[3]
local now = redis.call('TIME')
local known = redis.call('EXISTS', RECORD, LANES)
redis.call('ZADD', WORKERS, now[1] * 1000 + math.floor(now[2] / 1000), worker)
redis.call('SET', RECORD, record, 'PX', life_ms)
return {known == 2 and 1 or 0, now[1], now[2]}
