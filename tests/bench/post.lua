-- One POST over and over, and what came of it as a line of JSON.
-- usage: wrk … -s post.lua URL -- BODYFILE ['Header: value' …]

function init(args)
   local file = assert(io.open(args[1], "rb"))
   wrk.method = "POST"
   wrk.body = file:read("*all")
   file:close()
   for i = 2, #args do
      local name, value = args[i]:match("^(.-):%s*(.*)$")
      wrk.headers[name] = value
   end
end

function done(summary, latency, requests)
   local e = summary.errors
   io.write(string.format(
      '\n{"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "errors": %d, "status_errors": %d}\n',
      summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
      e.connect + e.read + e.write + e.timeout, e.status))
end
