-- beat (worker): extend the worker's leases, its record and its instances.
-- KEYS: workers, record of the worker, lanes that the worker serves, instances of the worker
-- ARGV: worker, record (JSON), lifetime of the record (ms), number of instances that were stored
-- returns {known, seconds, microseconds, stored}: known: 0 when the worker must add its lanes (again), because it is
-- new, was reclaimed, or Redis lost its data; else 1. Seconds and microseconds: the Redis clock. stored: 0 when the
-- instances were lost: then the record, which refers to them, is not written
local WORKERS, RECORD, LANES, INSTANCES = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, record, life_ms, instances = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local now = redis.call('TIME')
local known = redis.call('EXISTS', RECORD, LANES) == 2 and 1 or 0
redis.call('ZADD', WORKERS, now[1] * 1000 + math.floor(now[2] / 1000), worker)
if redis.call('HLEN', INSTANCES) ~= instances then return {known, now[1], now[2], 0} end
redis.call('SET', RECORD, record, 'PX', life_ms)
redis.call('PEXPIRE', INSTANCES, life_ms)
return {known, now[1], now[2], 1}
