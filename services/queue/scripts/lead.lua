-- lead (controller): become the leader if there is none, or stay it.
-- KEYS: leader, leader_token
-- ARGV: controller, life of the lead (ms)
-- returns {token, leader}: the controller leads with this fencing token; {0, leader}: another one leads
-- The token grows with each new leader. It is at least the time (us), so that it also grows when Redis lost its data.
local LEADER, LAST = KEYS[1], KEYS[2]
local name, life_ms = ARGV[1], tonumber(ARGV[2])
local known = redis.call('GET', LEADER)
if known then
  local token, leader = string.match(known, '^(%d+) (.*)$')
  if leader ~= name then
    -- The clock was set back since the leader renewed its lead, which else would outlive it by that time.
    if redis.call('PTTL', LEADER) > life_ms then redis.call('PEXPIRE', LEADER, life_ms) end
    return {0, leader}
  end
  redis.call('PEXPIRE', LEADER, life_ms)
  return {tonumber(token), name}
end
local now = redis.call('TIME')
local now_us = now[1] * 1e6 + now[2]
local token = string.format('%.0f', math.max(tonumber(redis.call('GET', LAST) or 0) + 1, now_us))
redis.call('SET', LAST, token)
redis.call('SET', LEADER, token .. ' ' .. name, 'PX', life_ms)
return {tonumber(token), name}
