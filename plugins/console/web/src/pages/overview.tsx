import { get } from "../api";
import { Chart } from "../chart";
import { overview, type Endpoint, type Problem } from "../live";
import { useLoaded } from "../loaded";
import { link } from "../router";
import { Table, type Column } from "../table";
import { Badge, Bar, Card, Empty, Figure, Head, Pending } from "../ui";
import { bytes, count, percent, rate, seconds } from "../units";

export interface History {
  step_s: number;
  at: number[];
  requests_per_s: (number | null)[];
  failed_per_s: (number | null)[];
  p50_s: (number | null)[];
  p99_s: (number | null)[];
  queue_rows: (number | null)[];
  busy: (number | null)[];
}

const endpoints: Column<Endpoint>[] = [
  { name: "Model", cell: (row) => <a href={link(["models", row.model])}>{row.model}</a>, by: (row) => row.model },
  { name: "Version", cell: (row) => row.version, by: (row) => row.version },
  { name: "Requests", cell: (row) => rate(row.requests_per_s), by: (row) => row.requests_per_s, right: true },
  {
    name: "Failed",
    cell: (row) => (row.failed_per_s ? <Badge kind="bad">{rate(row.failed_per_s)}</Badge> : rate(row.failed_per_s)),
    by: (row) => row.failed_per_s,
    right: true,
  },
  { name: "Invalid", cell: (row) => rate(row.invalid_per_s), by: (row) => row.invalid_per_s, right: true },
  { name: "p50", cell: (row) => seconds(row.p50_s), by: (row) => row.p50_s, right: true },
  { name: "p99", cell: (row) => seconds(row.p99_s), by: (row) => row.p99_s, right: true },
  { name: "Rows a batch", cell: (row) => (row.batch_rows == null ? "–" : row.batch_rows.toFixed(1)), by: (row) => row.batch_rows, right: true },
  { name: "Waiting", cell: (row) => count(row.queue_rows), by: (row) => row.queue_rows, right: true },
  { name: "Loaded", cell: (row) => count(row.instances), by: (row) => row.instances, right: true },
];

export function ProblemList(props: { problems: Problem[] }) {
  return (
    <>
      {props.problems.map((one) => (
        <div key={`${one.title} ${one.detail}`} class={one.severity === "critical" ? "problem critical" : "problem"}>
          <strong>{one.title}</strong> {one.model && <a href={link(["models", one.model])}>See {one.model}</a>}
          <p>{one.detail}</p>
          {one.action && <p><b>What to do:</b> {one.action}</p>}
        </div>
      ))}
    </>
  );
}

export function TrafficCharts(props: { model?: string }) {
  const query = props.model ? `?model=${encodeURIComponent(props.model)}` : "";
  const history = useLoaded((abort) => get<History>(`history${query}`, abort), [query], 15);
  const { value } = history;
  if (!value) return <Pending of={history} />;
  if (value.at.length < 2) return <Card title="The last hour"><Empty>The first point comes after half a minute.</Empty></Card>;
  return (
    <>
      <Card title="Requests">
        <Chart at={value.at} unit={rate} label="requests and failures a second in the last hour" lines={[
          { name: "requests", values: value.requests_per_s, colour: "a" },
          { name: "failed", values: value.failed_per_s, colour: "bad" },
        ]} />
      </Card>
      <Card title="Latency">
        <Chart at={value.at} unit={seconds} label="median and 99th percentile of the latency in the last hour" lines={[
          { name: "p50", values: value.p50_s, colour: "a" },
          { name: "p99", values: value.p99_s, colour: "b" },
        ]} />
      </Card>
    </>
  );
}

export function OverviewPage() {
  const now = overview.value;
  const totals = now?.totals;
  return (
    <>
      <Head title="Overview" />
      {!now || !totals ? (
        <Empty>Waiting for the first figures…</Empty>
      ) : (
        <>
          <ProblemList problems={now.problems} />
          <dl class="figures">
            <Figure name="Requests" value={rate(totals.requests_per_s)} />
            <Figure name="Failed" value={rate(totals.failed_per_s)} bad={!!totals.failed_per_s} />
            <Figure name="Refused" value={rate(totals.refused_per_s)} bad={!!totals.refused_per_s} />
            <Figure name="p50" value={seconds(totals.p50_s)} />
            <Figure name="p99" value={seconds(totals.p99_s)} />
            <Figure name="In flight" value={count(totals.in_flight)} />
            <Figure name="Waiting" value={count(totals.queue_rows)} />
            <Figure name="Gateways" value={`${totals.gateways_ready} of ${totals.gateways}`} bad={totals.gateways_ready < totals.gateways} />
            <Figure name="Redis" value={bytes(totals.redis_memory_bytes)} />
          </dl>
        </>
      )}
      <div class="cards"><TrafficCharts /></div>
      {now && (
        <div class="cards">
          <Card title="Endpoints" wide>
            <Table label="endpoints" columns={endpoints} rows={now.endpoints} keyOf={(row) => `${row.model}/${row.version}`} sort="Requests" descending
              empty="No model is called or loaded. Upload one, or call one." />
          </Card>
          <Card title="Workers" wide>
            <Table label="workers" rows={now.workers} keyOf={(row) => row.worker} empty="No worker runs: nothing can be answered." columns={[
              { name: "Worker", cell: (row) => <a href="#/workers">{row.worker}</a>, by: (row) => row.worker },
              { name: "Pool", cell: (row) => row.pool, by: (row) => row.pool },
              { name: "Device", cell: (row) => row.device },
              { name: "Busy", cell: (row) => <Bar used={row.busy ?? 0} total={1} label={percent(row.busy)} />, by: (row) => row.busy },
              { name: "Memory of models", cell: (row) => <Bar used={row.memory_used_bytes} total={row.memory_budget_bytes} label={`${bytes(row.memory_used_bytes)} of ${bytes(row.memory_budget_bytes)}`} />, by: (row) => row.memory_used_bytes },
              { name: "Process", cell: (row) => bytes(row.resident_bytes), by: (row) => row.resident_bytes, right: true },
              { name: "Models", cell: (row) => count(row.instances), by: (row) => row.instances, right: true },
              { name: "State", cell: (row) => (row.draining ? <Badge kind="warn">draining</Badge> : <Badge kind="good">ready</Badge>) },
            ]} />
          </Card>
        </div>
      )}
    </>
  );
}
