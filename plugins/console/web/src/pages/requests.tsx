// The slowest and the failed requests of the last minutes, with the stages in which their time went.
import { get } from "../api";
import { Field } from "../fields";
import { useLoaded } from "../loaded";
import { link, place, setQuery } from "../router";
import { Table, type Column } from "../table";
import { Ago, Badge, Card, Copy, Head, Pending, Tabs } from "../ui";
import { seconds, timeOfDay } from "../units";

interface Run {
  model: string;
  version: number | string;
  pool: string;
  rows: number;
  lane_s: number;
  queue_s: number;
  run_s: number;
}
interface Recorded {
  at: number;
  protocol: string;
  method: string;
  route: string;
  path: string;
  status: number;
  seconds: number;
  model: string | null;
  version: number | string | null;
  request_id: string;
  key: string | null;
  /** The process that answered it. */
  gateway: string;
  runs: Run[];
}

interface Found {
  slowest: Recorded[];
  failed: Recorded[];
  /** From when on calls were recorded. */
  since: number | null;
}

const EVERY_S = 5;
const STAGES = [
  { name: "lane", about: "waits in the gateway for its batch", of: (run: Run) => run.lane_s },
  { name: "queue", about: "waits in Redis for a worker", of: (run: Run) => run.queue_s },
  { name: "run", about: "the worker computes", of: (run: Run) => run.run_s },
] as const;

/** Returns the seconds of each stage; "other" is what is not in a run: reading, checks, writing the answer. */
function stagesOf(row: Recorded): { name: string; seconds: number }[] {
  // Runs of one request may overlap: their longest stage counts, and never more than the request took.
  let left = row.seconds;
  const found = STAGES.map((stage) => {
    const longest = Math.min(left, Math.max(0, ...row.runs.map(stage.of)));
    left -= longest;
    return { name: stage.name as string, seconds: longest };
  });
  return [...found, { name: "other", seconds: Math.max(0, left) }];
}

function Stages(props: { row: Recorded; longest: number }) {
  const stages = stagesOf(props.row).filter((stage) => stage.seconds > 0);
  const text = stages.map((stage) => `${stage.name} ${seconds(stage.seconds)}`).join(", ");
  return (
    <>
      <div class="stages" aria-hidden="true">
        {stages.map((stage) => (
          <span key={stage.name} class={stage.name} style={{ width: `${(100 * stage.seconds) / props.longest}%` }} />
        ))}
      </div>
      <div class="hint">{text || "no run"}</div>
    </>
  );
}

function isFailure(row: Recorded): boolean {
  return row.protocol === "http" ? row.status >= 400 : row.status !== 0; // gRPC's OK is 0
}

function columnsFor(longest: number): Column<Recorded>[] {
  return [
    { name: "When", cell: (row) => <Ago at={row.at} />, by: (row) => row.at },
    {
      name: "Model",
      cell: (row) => (row.model ? <><a href={link(["models", row.model])}>{row.model}</a>{row.version != null && ` ${row.version}`}</> : "–"),
      by: (row) => row.model,
    },
    {
      name: "Call",
      long: true,
      cell: (row) => (
        <>
          {row.method} {row.path || row.route}
          <div class="hint">{[row.protocol, row.gateway, row.key && `key ${row.key}`].filter(Boolean).join(", ")}</div>
        </>
      ),
      by: (row) => row.route,
    },
    {
      name: "Status",
      cell: (row) => (isFailure(row) ? <Badge kind="bad">failed, {row.status}</Badge> : <Badge kind="good">{row.status}</Badge>),
      by: (row) => row.status,
    },
    { name: "Time", cell: (row) => seconds(row.seconds), by: (row) => row.seconds, right: true },
    { name: "Stages", cell: (row) => <Stages row={row} longest={longest} /> },
    {
      name: "Request id",
      cell: (row) => row.request_id && <span class="with-copy"><code>{row.request_id}</code><Copy text={row.request_id} label={`copy the request id ${row.request_id}`} /></span>,
    },
  ];
}

export function RequestsPage() {
  const query = place.value.query;
  const tab = query.get("show") === "failed" ? "failed" : "slowest";
  const model = query.get("model") ?? "";
  const loaded = useLoaded((abort) => get<Found>("requests", abort), [], EVERY_S);
  const { value } = loaded;
  const all = value ? [...value.slowest, ...value.failed] : [];
  const models = [...new Set([...all.map((row) => row.model ?? ""), model])].filter(Boolean).sort();
  const rows = value?.[tab].filter((row) => !model || row.model === model || row.runs.some((run) => run.model === model)) ?? [];
  const longest = Math.max(1e-9, ...rows.map((row) => row.seconds));
  return (
    <>
      <Head title="Requests" />
      <Tabs names={[["slowest", "Slowest"], ["failed", "Failed"]]} active={tab} onPick={(name) => setQuery({ show: name, model })} />
      <Card>
        <div class="filters">
          <Field title="Model" value={model} options={[["", "all models"], ...models.map((name): [string, string] => [name, name])]} onText={(chosen) => setQuery({ show: tab, model: chosen })} />
          <p class="hint">
            At most 50 of the last 10 minutes, recorded while somebody looks at the console{value?.since != null && `: since ${timeOfDay(value.since)}`}.
          </p>
        </div>
        <ul class="legend" aria-label="stages of a request">
          {STAGES.map((stage) => <li key={stage.name}><span class={`swatch ${stage.name}`} aria-hidden="true" />{stage.name}: {stage.about}</li>)}
          <li><span class="swatch other" aria-hidden="true" />other: reading, checks, writing the answer</li>
        </ul>
        <Pending of={loaded} />
        {value && (
          <Table label={`${tab} requests`} key={tab} columns={columnsFor(longest)} rows={rows} sort={tab === "failed" ? "When" : "Time"} descending
            keyOf={(row) => `${row.at} ${row.request_id} ${row.path}`}
            empty={tab === "failed" ? "No request failed while somebody looked." : "No request came while somebody looked."} />
        )}
      </Card>
    </>
  );
}
