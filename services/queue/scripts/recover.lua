-- recover (worker): return the leases of the worker that it does not know, after its connection broke: the answer with
-- them may be lost. They include the entries in the inbox, which is emptied; the worker is no longer idle.
-- KEYS: ready, deadlines, vtimes, idle, workers, lanes that the worker serves, lanes that it drains, its inbox
-- ARGV: prefix, worker, then for each entry that it knows: lane, entry id
-- returns a list of {lane, id, batch, attempt}
local LANES, DRAINING, INBOX = KEYS[6], KEYS[7], KEYS[8]
local worker = ARGV[2]
redis.call('DEL', INBOX)
redis.call('ZREM', IDLE, worker)
local known, missing = {}, {}
for i = 3, #ARGV, 2 do
  local lane, id = ARGV[i], ARGV[i + 1]
  known[id .. ' ' .. lane] = true
end
for _, lane in ipairs(redis.call('SUNION', LANES, DRAINING)) do
  local got = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'STREAMS', PREFIX .. 'stream:' .. lane, '0')
  for _, entry in ipairs(got and not got.err and got[1][2] or {}) do
    if entry[FIELDS] and not known[entry[ID] .. ' ' .. lane] then
      missing[#missing + 1] = leased_item(lane, entry)
    end
  end
end
return missing
