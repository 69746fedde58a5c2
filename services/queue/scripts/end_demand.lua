-- end_demand (worker): the worker serves a version that it was ordered to load, or does not load it: another worker
-- may be ordered from now on.
-- KEYS: ready, deadlines, vtimes, idle, workers, demands
-- ARGV: prefix, lane, worker
-- returns 1 when the demand was this worker's
local DEMANDS = KEYS[6]
local known = redis.call('HGET', DEMANDS, ARGV[2])
if not known or string.match(known, '^(.*) %d+$') ~= ARGV[3] then return 0 end
return redis.call('HDEL', DEMANDS, ARGV[2])
