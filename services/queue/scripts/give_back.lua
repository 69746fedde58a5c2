-- give_back (worker): a run takes long: what the worker leases beside it is put again, for others; no attempt is used up.
-- KEYS: lanes the worker holds, lanes it drains, inbox of the worker, idle
-- ARGV: key prefix, worker, then names of the batches that it runs
-- returns how many batches were put again
local prefix, worker = ARGV[1], ARGV[2]
local running, given = {}, 0
for i = 3, #ARGV do running[ARGV[i]] = true end
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], worker) -- else it would be offered what it gives back
for _, lane in ipairs(redis.call('SUNION', KEYS[1], KEYS[2])) do
  local stream, start = prefix .. 'stream:' .. lane, '-'
  while start do
    local leases = redis.pcall('XPENDING', stream, 'w', start, '+', 100, worker)
    for _, leased in ipairs(leases) do
      local entry = redis.call('XRANGE', stream, leased[1], leased[1])[1]
      local fields = entry and entry[2]
      if fields and not running[fields[10]] then
        redis.call('XACK', stream, 'w', leased[1])
        redis.call('XDEL', stream, leased[1])
        append(prefix, lane, fields[2], fields[4], fields[6], fields[8], fields[10], fields[12] or 1, fields[14] or 1)
        given = given + 1
      end
    end
    start = #leases == 100 and '(' .. leases[100][1] or nil
  end
end
return given
