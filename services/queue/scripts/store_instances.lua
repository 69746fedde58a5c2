-- store_instances (worker): store the instances that changed, or all of them.
-- KEYS: instances of the worker
-- ARGV: lifetime (ms), 1: these are all instances, then content id and JSON of each; JSON "" removes an instance
-- returns the number of instances that are stored
local INSTANCES = KEYS[1]
if ARGV[2] == '1' then redis.call('DEL', INSTANCES) end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', INSTANCES, ARGV[i])
  else
    redis.call('HSET', INSTANCES, ARGV[i], ARGV[i + 1])
  end
end
redis.call('PEXPIRE', INSTANCES, ARGV[1])
return redis.call('HLEN', INSTANCES)
