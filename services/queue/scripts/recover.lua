-- recover (worker): a connection broke, and with it perhaps the answer that brought leases: what the worker leases but
-- does not have. Its inbox is part of that, so the inbox is emptied and the worker is not idle.
-- KEYS: lanes the worker holds, lanes it drains, inbox of the worker, idle
-- ARGV: key prefix, worker, then for each entry that it has: lane, entry id
-- returns a list of {lane, id, batch, attempt}
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
local known, missing = {}, {}
for i = 3, #ARGV, 2 do known[ARGV[i + 1] .. ' ' .. ARGV[i]] = true end
for _, lane in ipairs(redis.call('SUNION', KEYS[1], KEYS[2])) do
  local got = redis.pcall('XREADGROUP', 'GROUP', 'w', ARGV[2], 'STREAMS', ARGV[1] .. 'stream:' .. lane, '0')
  for _, entry in ipairs(got and not got.err and got[1][2] or {}) do
    if entry[2] and not known[entry[1] .. ' ' .. lane] then
      missing[#missing + 1] = {lane, entry[1], entry[2][2], entry[2][4]}
    end
  end
end
return missing
