-- running (worker): report a long run while it goes on: its lane is charged for it, and counts as one with long runs.
-- KEYS: ready, deadlines, vtimes, idle, workers
-- ARGV: prefix, worker, then, unless the run is over: lane, run time that it was not charged for (ms), how long it counts
--       as one with long runs (ms), age of the run (ms), 1: the worker is not idle, although Redis may think so because
--       it is attached
-- returns 1: a call of another lane that the worker serves waits for a worker; else 0
local worker, lane, ms, long_ms, age_ms = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local BEFORE_MS = 200 -- a call that was put so long before the run began may wait for it
if not lane then
  redis.call('HDEL', PREFIX .. 'held', worker)
  return 0
end
if not redis.call('ZSCORE', WORKERS, worker) then return 0 end -- reclaimed: its batches are other workers' now
note_held(worker, lane)
note_long(lane, long_ms)
if ARGV[7] == '1' then redis.call('ZREM', IDLE, worker) end
if ms > 0 then charge(lane, ms) end
-- What waits of a lane that was not called meanwhile are readiness probes.
for _, other in ipairs(called(worker, age_ms + BEFORE_MS)) do
  if other ~= lane and redis.call('HEXISTS', DEADLINES, other) == 1 then return 1 end
end
return 0
