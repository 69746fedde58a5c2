-- step_down (controller): end its own lead, so that another controller leads at once.
-- KEYS: leader
-- ARGV: controller, token
-- returns 1 when it led
local LEADER = KEYS[1]
if redis.call('GET', LEADER) ~= ARGV[2] .. ' ' .. ARGV[1] then return 0 end
return redis.call('DEL', LEADER)
