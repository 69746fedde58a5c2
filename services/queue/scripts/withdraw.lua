-- withdraw (gateway): nobody waits for a batch any more. Where no worker holds its lane, nothing else would take it away
-- before its stream expires; else it is run, or found to be too late.
-- KEYS: stream of the lane
-- ARGV: key prefix, lane, batch name
-- returns 1 when the batch was taken out
if held_by_any(ARGV[1], ARGV[2]) then return 0 end
local taken = 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  if entry[2][10] == ARGV[3] then
    local leases = redis.pcall('XPENDING', KEYS[1], 'w', entry[1], entry[1], 1)
    if #leases == 0 then taken = taken + redis.call('XDEL', KEYS[1], entry[1]) end
  end
end
if taken > 0 and undelivered(ARGV[1], ARGV[2]) == 0 then
  unmark_ready(ARGV[1], ARGV[2])
  drop_if_unused(ARGV[1], ARGV[2])
end
return taken
