-- running (worker): report a long run while it goes on: its lane is charged for it, and counts as one with long runs.
-- KEYS: ready, deadlines, vtimes, idle, workers
-- ARGV: prefix, worker, then, unless the run is over: lane, run time that it was not charged for (ms), how long it counts
--       as one with long runs (ms), age of the run (ms), 1: the worker is not idle, although Redis may think so because
--       it is attached, 1: the run may be ended to run again
-- returns {calls, behind}: calls is 1 if a call of another lane that the worker serves waits for a worker; 2 if the lane
--         may not have this one besides, so the run is to be ended, and to run again when the lane may have a worker; else
--         0. behind is 1 if a batch of such a lane waits behind the run, else 0.
local worker, lane, ms, long_ms, age_ms = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local BEFORE_MS = 200 -- a call that was put so long before the run began may wait for it
if not lane then
  redis.call('HDEL', PREFIX .. 'held', worker)
  return {0, 0}
end
if not redis.call('ZSCORE', WORKERS, worker) then return {0, 0} end -- reclaimed: its batches are other workers' now
note_held(worker, lane)
note_long(lane, long_ms)
if ARGV[7] == '1' then redis.call('ZREM', IDLE, worker) end
if ms > 0 then charge(lane, ms) end
-- What waits of a lane that was not called meanwhile are readiness probes.
local calls, behind = 0, 0
for _, other in ipairs(called(worker, age_ms + BEFORE_MS)) do
  if other ~= lane then
    -- The worker had the batch before, or seemed to be idle.
    local leases = redis.pcall('XPENDING', PREFIX .. 'stream:' .. other, GROUP, '-', '+', 1, worker)
    if not leases.err and #leases > 0 then behind = 1 end
    if behind == 1 or redis.call('HEXISTS', DEADLINES, other) == 1 then calls = 1 end
  end
end
if calls == 1 and ARGV[8] == '1' and not reserve(worker)(lane) then
  redis.call('HDEL', PREFIX .. 'held', worker) -- else all its workers would be told so
  calls = 2
end
return {calls, behind}
