// Which worker holds what and why, the memory of each, and which models wait.
import { admin, get } from "../api";
import { workerName } from "../documents";
import { overview, type Worker as Live } from "../live";
import { useLoaded } from "../loaded";
import { Table } from "../table";
import { Badge, Bar, Card, Empty, Facts, Head, Pending } from "../ui";
import { bytes, count, percent, when } from "../units";
import { heldColumns, isHeldUp, modelColumn, placedColumns, type Holder, type Placement } from "./placement";

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

function liveOf(worker: Holder, workers: Holder[], live: Live[] = []): Live | undefined {
  const name = workerName(worker.id);
  const alone = workers.filter((one) => workerName(one.id) === name).length === 1;
  return alone ? live.find((one) => one.worker === name && one.pool === worker.pool) : undefined;
}

function hardwareText({ hardware }: Info): string {
  return [hardware?.name || hardware?.kind, hardware?.cores && `${hardware.cores} cores`, hardware?.memory_bytes && bytes(hardware.memory_bytes), hardware?.driver].filter(Boolean).join(", ");
}

function WorkerCard(props: { worker: Holder; live?: Live; info?: Info; open: boolean }) {
  const { worker, live, info } = props;
  const used = live?.memory_used_bytes ?? worker.used_bytes;
  const onDevice = !!worker.device_budget_bytes || worker.device_used_bytes > 0;
  const memory = (taken: number, total: number | null) => <Bar used={taken} total={total} label={total ? `${bytes(taken)} of ${bytes(total)}` : `${bytes(taken)}, no limit`} />;
  return (
    <Card title={workerName(worker.id)} wide aside={worker.draining ? <Badge kind="warn">draining: it stops soon</Badge> : <Badge kind="good">serves</Badge>}>
      <Facts of={[
        ["Pool and device", `${worker.pool}, on ${worker.device}`],
        ["Id", worker.id],
        ["Busy", live ? <Bar used={live.busy ?? 0} total={1} label={percent(live.busy)} /> : "–"],
        ["Memory of models", memory(used, worker.budget_bytes)],
        ["Device memory", onDevice && memory(worker.device_used_bytes, worker.device_budget_bytes)],
        ["Process", live?.resident_bytes != null && `${bytes(live.resident_bytes)} resident`],
      ]} />
      <details open={props.open}>
        <summary>{count(live?.instances ?? worker.instances_total)} models held</summary>
        <Table label={`models in ${worker.id}`} rows={worker.instances.map((one) => ({ worker, one }))} keyOf={({ one }) => `${one.model}/${one.version}`}
          columns={[{ name: "Model", cell: ({ one }) => modelColumn.cell(one), by: ({ one }) => `${one.model} ${one.version}` }, ...heldColumns(onDevice)]}
          sort="Memory" descending empty="It holds no model." />
      </details>
      {info && (
        <details>
          <summary>What it runs on</summary>
          <Facts of={[
            ["Process", `${info.pid} on ${info.host}, ${info.backend}`],
            ["Started", when(info.started)],
            ["Hardware", hardwareText(info)],
            ["Libraries", Object.entries(info.packages).map(([name, version]) => `${name} ${version}`).join(", ")],
            ["Clock", !!info.clock_ahead_s && `${info.clock_ahead_s} s ahead of Redis: set the clock of the machine`],
          ]} />
        </details>
      )}
    </Card>
  );
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
      <Head title="Workers and placement">
        {found && (found.leader ? <Badge kind="good">{found.leader.name} leads</Badge> : <Badge kind="warn">no controller leads: only calls load models</Badge>)}
      </Head>
      <Pending of={{ ...placement, error: placement.error ?? workers.error ?? pools.error }} />
      {found && (
        <div class="cards">
          <Card title="Waiting and refused" wide>
            <Table label="models that wait or were refused" columns={placedColumns} rows={heldUp} keyOf={(row) => `${row.model}/${row.version}`} empty="No model waits for a worker, and no load was refused." />
            {standby.length > 0 && (
              <details>
                <summary>{count(standby.length)} on standby</summary>
                <Table label="models on standby" columns={placedColumns} rows={standby} keyOf={(row) => `${row.model}/${row.version}`} />
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
