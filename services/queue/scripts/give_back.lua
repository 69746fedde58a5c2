-- give_back (worker): put again, for other workers, all batches that the worker leases except those of a long run. No
-- attempt is used up.
-- KEYS: ready, deadlines, vtimes, idle, workers, lanes that the worker serves, lanes that it drains, its inbox
-- ARGV: prefix, worker, then names of the batches that it runs
-- returns the number of batches that were put again
local LANES, DRAINING, INBOX = KEYS[6], KEYS[7], KEYS[8]
local worker = ARGV[2]
local running, given = {}, 0
for i = 3, #ARGV do running[ARGV[i]] = true end
redis.call('DEL', INBOX)
redis.call('ZREM', IDLE, worker) -- else an idle worker would be offered what it gives back
for _, lane in ipairs(redis.call('SUNION', LANES, DRAINING)) do
  local stream, start = PREFIX .. 'stream:' .. lane, '-'
  while start do
    local leases = redis.pcall('XPENDING', stream, GROUP, start, '+', 100, worker)
    for _, leased in ipairs(leases) do
      local id = leased[ID]
      local entry = redis.call('XRANGE', stream, id, id)[1]
      local fields = entry and entry[FIELDS]
      if fields and not running[fields[NAME]] then
        redis.call('XACK', stream, GROUP, id)
        redis.call('XDEL', stream, id)
        append_again(lane, fields, fields[ATTEMPT])
        given = given + 1
      end
    end
    start = #leases == 100 and '(' .. leases[100][ID] or nil
  end
end
return given
