// Which worker holds what and why, the memory of each, and which models wait.
import { admin, get } from "../api";
import { overview, type Worker as Live } from "../live";
import { link } from "../router";
import { Badge, Bar, Card, Empty, ErrorLine, Table, useLoaded, type Column } from "../ui";
import { bytes, count, percent, seconds, when } from "../units";

interface Instance {
  model: string;
  version: number;
  state: string;
  reason: string | null;
  size_bytes: number;
  device_size_bytes: number;
  load_s: number;
  loaded_age_s: number | null;
  last_used_age_s: number | null;
  in_use: boolean;
  pinned: boolean;
  why: string;
}
interface Holder {
  id: string;
  pool: string;
  device: string;
  draining: boolean;
  budget_bytes: number | null;
  used_bytes: number;
  device_budget_bytes: number | null;
  device_used_bytes: number;
  instances_total: number;
  instances: Instance[];
}
interface Version {
  model: string;
  version: number;
  state: string;
  reason: string | null;
  pools: string[];
  holders: string[];
  failed: { worker: string; reason: string }[];
  standby: boolean;
  load: { size_bytes: number; peak_bytes: number; device_size_bytes: number; load_s: number; measured: boolean } | null;
  refusals: { worker: string; kind: string; reason: string; retry_after_s: number }[];
  missing: string | null;
}
interface Placement {
  leader: { name: string; token: number } | null;
  workers: Holder[];
  models: Version[];
  next_page_token: string | null;
}
interface Info {
  id: string;
  backend: string;
  pid: number;
  host: string;
  started: number;
  clock_ahead_s: number | null;
  hardware: { kind: string; name: string; memory_bytes: number; cores: number; driver: string } | null;
  packages: Record<string, string>;
}
interface Pool {
  name: string;
  workers: number;
  devices: string[];
  backends: string[];
  versions: number;
  instances: number;
  instances_ready: number;
}

const MANY = 200; // models above which the placement is read seldom: it is long
const OPEN_WORKERS = 6;

/** All pages of the placement in one. */
async function wholePlacement(abort: AbortSignal): Promise<Placement> {
  const whole = await get<Placement>(`${admin("placement")}?limit=1000`, abort);
  while (whole.next_page_token) {
    const page = await get<Placement>(`${admin("placement")}?limit=1000&page_token=${encodeURIComponent(whole.next_page_token)}`, abort);
    whole.models.push(...page.models);
    for (const worker of whole.workers) worker.instances.push(...(page.workers.find((one) => one.id === worker.id)?.instances ?? []));
    whole.next_page_token = page.next_page_token;
  }
  return whole;
}

export function StateBadge(props: { state: string }) {
  const kind = props.state === "ready" ? "good" : props.state === "failed" ? "bad" : ["loading", "warming", "draining"].includes(props.state) ? "warn" : "plain";
  return <Badge kind={kind}>{props.state}</Badge>;
}

function modelLink(row: { model: string; version: number }) {
  return <><a href={link(["models", row.model])}>{row.model}</a> {row.version}</>;
}

function age(value: number | null, none: string) {
  return value == null ? none : `${seconds(Math.round(value))} ago`;
}

function heldColumns(worker: Holder): Column<Instance>[] {
  const memory = (used: number, total: number | null) => <Bar used={used} total={total} label={bytes(used)} />;
  return [
    { name: "Model", cell: modelLink, by: (row) => `${row.model} ${row.version}` },
    { name: "State", cell: (row) => <><StateBadge state={row.state} />{row.reason && <div class="hint">{row.reason}</div>}</>, by: (row) => row.state },
    { name: "Memory", cell: (row) => memory(row.size_bytes, worker.budget_bytes), by: (row) => row.size_bytes },
    ...(worker.device_used_bytes || worker.device_budget_bytes
      ? [{ name: "Device memory", cell: (row: Instance) => memory(row.device_size_bytes, worker.device_budget_bytes), by: (row: Instance) => row.device_size_bytes }]
      : []),
    { name: "Why it is here", cell: (row) => <>{row.why || "–"} {row.pinned && <Badge>pinned</Badge>}</>, by: (row) => row.why, long: true },
    { name: "Last call", cell: (row) => (row.in_use ? <Badge kind="good">in use</Badge> : age(row.last_used_age_s, "none yet")), by: (row) => row.last_used_age_s },
    { name: "Loaded", cell: (row) => age(row.loaded_age_s, "–"), by: (row) => row.loaded_age_s },
    { name: "Load took", cell: (row) => (row.load_s ? seconds(row.load_s) : "–"), by: (row) => row.load_s, right: true },
  ];
}

/** The name of a worker on its machine: events name it so; workers of several machines may share one. */
function nameOf(worker: Holder): string {
  return worker.id.replace(/-[^-]*$/, "");
}

function liveOf(worker: Holder, workers: Holder[], live: Live[] = []): Live | undefined {
  const name = nameOf(worker);
  const alone = workers.filter((one) => nameOf(one) === name).length === 1;
  return alone ? live.find((one) => one.worker === name && one.pool === worker.pool) : undefined;
}

function WorkerCard(props: { worker: Holder; live?: Live; info?: Info; open: boolean }) {
  const { worker, live, info } = props;
  const used = live?.memory_used_bytes ?? worker.used_bytes;
  const facts: [string, string][] = info
    ? [
        ["Process", `${info.pid} on ${info.host}, ${info.backend}`],
        ["Started", when(info.started)],
        ["Hardware", [info.hardware?.name || info.hardware?.kind, info.hardware?.cores && `${info.hardware.cores} cores`, info.hardware?.memory_bytes && bytes(info.hardware.memory_bytes), info.hardware?.driver].filter(Boolean).join(", ")],
        ["Libraries", Object.entries(info.packages).map(([name, version]) => `${name} ${version}`).join(", ")],
        ...(info.clock_ahead_s ? [["Clock", `${info.clock_ahead_s} s ahead of Redis: set the clock of the machine`] as [string, string]] : []),
      ]
    : [];
  return (
    <Card title={nameOf(worker)} wide aside={worker.draining ? <Badge kind="warn">draining: it stops soon</Badge> : <Badge kind="good">serves</Badge>}>
      <dl class="pairs">
        <dt>Pool and device</dt><dd>{worker.pool}, on {worker.device}</dd>
        <dt>Id</dt><dd>{worker.id}</dd>
        <dt>Busy</dt><dd>{live ? <Bar used={live.busy ?? 0} total={1} label={percent(live.busy)} /> : "–"}</dd>
        <dt>Memory</dt><dd><Bar used={used} total={worker.budget_bytes} label={worker.budget_bytes ? `${bytes(used)} of ${bytes(worker.budget_bytes)}` : `${bytes(used)}, no limit`} /></dd>
        {(worker.device_budget_bytes || worker.device_used_bytes > 0) && (
          <><dt>Device memory</dt><dd><Bar used={worker.device_used_bytes} total={worker.device_budget_bytes} label={`${bytes(worker.device_used_bytes)} of ${bytes(worker.device_budget_bytes)}`} /></dd></>
        )}
        {live?.resident_bytes != null && <><dt>Process</dt><dd>{bytes(live.resident_bytes)} resident</dd></>}
      </dl>
      <details open={props.open}>
        <summary>{count(live?.instances ?? worker.instances_total)} models held</summary>
        <Table label={`models in ${worker.id}`} columns={heldColumns(worker)} rows={worker.instances} keyOf={(row) => `${row.model}/${row.version}`}
          sort="Memory" descending empty="It holds no model." />
      </details>
      {facts.length > 0 && (
        <details>
          <summary>What it runs on</summary>
          <dl class="pairs">{facts.map(([name, text]) => <><dt>{name}</dt><dd>{text || "–"}</dd></>)}</dl>
        </details>
      )}
    </Card>
  );
}

const waitingColumns: Column<Version>[] = [
  { name: "Model", cell: modelLink, by: (row) => `${row.model} ${row.version}` },
  { name: "State", cell: (row) => <StateBadge state={row.state} />, by: (row) => row.state },
  {
    name: "Why",
    long: true,
    cell: (row) => (
      <>
        {row.missing && <div>{row.missing}</div>}
        {row.reason && <div>{row.reason}</div>}
        {row.refusals.map((one) => <div key={one.worker}>{one.worker} refused ({one.kind}): {one.reason}. Next try in {seconds(one.retry_after_s)}.</div>)}
        {row.failed.map((one) => <div key={one.worker}>{one.worker} could not load it: {one.reason}</div>)}
        {!isHeldUp(row) && <div>Its first call makes a worker load it.</div>}
      </>
    ),
  },
  { name: "Pools", cell: (row) => row.pools.join(", ") },
  {
    name: "A load takes",
    cell: (row) => (row.load ? <>{row.load.measured ? "" : "about "}{bytes(row.load.size_bytes + row.load.peak_bytes)}{row.load.load_s > 0 && `, ${seconds(row.load.load_s)}`}</> : "–"),
    by: (row) => row.load && row.load.size_bytes + row.load.peak_bytes,
  },
];

function isHeldUp(row: Version): boolean {
  return !!row.missing || row.refusals.length > 0 || row.failed.length > 0 || row.state === "failed";
}

export function WorkersPage() {
  const frame = overview.value;
  const every = (frame?.endpoints.length ?? 0) > MANY ? 60 : 5;
  const placement = useLoaded(wholePlacement, [every], every);
  const workers = useLoaded((abort) => get<{ workers: Info[] }>(admin("workers"), abort), [], 60);
  const pools = useLoaded((abort) => get<{ pools: Pool[] }>(admin("pools"), abort), [every], every);
  const found = placement.value;
  const heldUp = found?.models.filter(isHeldUp) ?? [];
  const standby = found?.models.filter((row) => row.standby && !isHeldUp(row)) ?? [];
  return (
    <>
      <div class="head">
        <h1>Workers and placement</h1>
        {found && (found.leader ? <Badge kind="good">controller {found.leader.name} leads</Badge> : <Badge kind="warn">no controller leads: only calls load models</Badge>)}
      </div>
      <ErrorLine error={placement.error ?? workers.error ?? pools.error} again={placement.reload} />
      {found && (
        <div class="cards">
          <Card title="Waiting and refused" wide>
            <Table label="models that wait or were refused" columns={waitingColumns} rows={heldUp} keyOf={(row) => `${row.model}/${row.version}`} empty="No model waits for a worker, and no load was refused." />
            {standby.length > 0 && (
              <details>
                <summary>{count(standby.length)} on standby</summary>
                <Table label="models on standby" columns={waitingColumns} rows={standby} keyOf={(row) => `${row.model}/${row.version}`} />
              </details>
            )}
          </Card>
          {found.workers.map((worker) => (
            <WorkerCard key={worker.id} worker={worker} live={liveOf(worker, found.workers, frame?.workers)}
              info={workers.value?.workers.find((one) => one.id === worker.id)} open={found.workers.length <= OPEN_WORKERS} />
          ))}
          {!found.workers.length && <Card title="Workers" wide><Empty>No worker runs: nothing can be answered. Start one with <code>millstream worker</code>, or look at the logs.</Empty></Card>}
        </div>
      )}
      {pools.value && (
        <Card title="Pools">
          <Table label="pools" rows={pools.value.pools} keyOf={(pool) => pool.name} empty="There is no pool." columns={[
            { name: "Pool", cell: (pool) => pool.name, by: (pool) => pool.name },
            { name: "Workers", cell: (pool) => (pool.workers ? count(pool.workers) : <Badge kind="warn">none</Badge>), by: (pool) => pool.workers, right: true },
            { name: "Devices", cell: (pool) => pool.devices.join(", ") || "–" },
            { name: "Backends", cell: (pool) => pool.backends.join(", ") || "–" },
            { name: "Versions", cell: (pool) => count(pool.versions), by: (pool) => pool.versions, right: true },
            { name: "Loaded", cell: (pool) => `${pool.instances_ready} of ${pool.instances} ready`, by: (pool) => pool.instances, right: true },
          ]} />
        </Card>
      )}
    </>
  );
}
