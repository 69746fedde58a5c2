// How many workers each pool should have, and why, as the leading controller decided.
import { useEffect, useState } from "preact/hooks";
import { admin, ApiError, get } from "../api";
import { Chart } from "../chart";
import { useLoaded } from "../loaded";
import { Table } from "../table";
import { Ago, Badge, Card, Empty, Figure, Head, Pending } from "../ui";
import { ago, count, percent, rate, seconds } from "../units";

interface PoolScale {
  pool: string;
  wanted: number;
  ready: number;
  workers_min: number;
  workers_max: number;
  queue_rows: number;
  oldest_wait_s: number;
  arrival_rows_per_s: number;
  capacity_rows_per_s: number;
  utilisation: number;
  reason: string;
  decided_at: number;
  start_s: number;
  explanation: string[];
}

const EVERY_S = 2;
const KEPT = 900; // half an hour
const OLD_S = 10; // a controller decides each second
const REASONS: Record<string, string> = {
  arrivals: "so many are needed for the work that arrives",
  backlog: "rows wait that fewer workers would not answer in time",
  held: "fewer are needed now; they stay a while in case the load comes back",
  recurring: "fewer are needed now, but bursts need them again at regular intervals",
  idle: "nothing arrives: the minimum stays",
  minimum: "the load needs fewer than the minimum",
  maximum: "the load needs more than the maximum allows",
  unbounded: "the pool has no limits, so the workers that run stay",
};

/** Also between whole numbers, for the ticks of a short axis. */
function tick(value: number | null): string {
  return value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
}

interface Point {
  at: number;
  wanted: number;
  ready: number;
  queue_rows: number;
}

export function ScalingPage() {
  const loaded = useLoaded(
    async (abort) => ({ ...(await get<{ pools: PoolScale[] }>(admin("scale"), abort)), read_at: Date.now() / 1000 }),
    [],
    EVERY_S,
  );
  const { value, error } = loaded;
  const [history, setHistory] = useState<Record<string, Point[]>>({});
  useEffect(() => {
    if (!value) return;
    setHistory((before) =>
      Object.fromEntries(value.pools.map((pool) => [pool.pool, [...(before[pool.pool] ?? []), { ...pool, at: value.read_at }].slice(-KEPT)])),
    );
  }, [value]);
  const off = error instanceof ApiError && error.status === 404;
  return (
    <>
      <Head title="Autoscaling" />
      {off ? <Off /> : <Pending of={loaded} />}
      {!off && value && !value.pools.length && <Undecided />}
      {!off && value && (
        <div class="cards">
          {value.pools.map((pool) => <Pool key={pool.pool} pool={pool} now={value.read_at} history={history[pool.pool] ?? []} />)}
        </div>
      )}
    </>
  );
}

function Off() {
  return (
    <Card title="Autoscaling is off">
      <p>This server runs without the plug-in <code>fleet</code>: pools keep the number of workers that they were started with.</p>
    </Card>
  );
}

function Undecided() {
  return (
    <Card title="No controller has decided yet">
      <p>Pools keep the workers that they have. The first decision comes some seconds after a controller starts.</p>
      <p>
        Start the server without <code>--no-controller</code>, and give a pool a range: <code>millstream up --pool cpu=1:4</code>.
      </p>
    </Card>
  );
}

function Pool(props: { pool: PoolScale; now: number; history: Point[] }) {
  const { pool, history } = props;
  const fixed = pool.workers_min === pool.workers_max;
  const old = props.now - pool.decided_at > OLD_S;
  const limits = pool.reason === "unbounded" ? "no limits" : fixed ? `always ${pool.workers_min}` : `${pool.workers_min} to ${pool.workers_max}`;
  const state =
    pool.wanted === pool.ready ? <Badge kind="good">as wanted</Badge>
    : pool.wanted > pool.ready ? <Badge kind="warn">{pool.wanted - pool.ready} more to start</Badge>
    : <Badge kind="warn">{pool.ready - pool.wanted} to stop</Badge>;
  return (
    <Card wide title={`Pool ${pool.pool}`} aside={old ? <Badge kind="bad">no controller leads; decided {ago(pool.decided_at)}</Badge> : state}>
      <p><b>{pool.wanted}</b> wanted: {REASONS[pool.reason] ?? pool.reason}.</p>
      <dl class="figures">
        <Figure name="Wanted" value={count(pool.wanted)} note={limits} />
        <Figure name="Ready" value={count(pool.ready)} bad={!old && pool.ready < pool.wanted} />
        <Figure name="Waiting rows" value={count(pool.queue_rows)} note={`the oldest ${seconds(pool.oldest_wait_s)}`} />
        <Figure name="Arriving rows" value={rate(pool.arrival_rows_per_s)} />
        <Figure name="Workers can answer" value={rate(pool.capacity_rows_per_s || null)} />
        <Figure name="Utilisation" value={percent(pool.utilisation)} bad={pool.utilisation > 1} />
        <Figure name="A worker's start" value={seconds(pool.start_s || null)} />
      </dl>
      <h3>Since this page was opened</h3>
      {history.length < 2 ? (
        <Empty>The first points come in some seconds.</Empty>
      ) : (
        <Chart at={history.map((point) => point.at)} unit={tick} label={`workers wanted and ready of pool ${pool.pool} since this page was opened`} lines={[
          { name: "wanted", values: history.map((point) => point.wanted), colour: "a" },
          { name: "ready", values: history.map((point) => point.ready), colour: "b" },
          { name: "waiting rows", values: history.map((point) => point.queue_rows), colour: "c" },
        ]} />
      )}
      <Changes pool={pool.pool} decided={pool.wanted} />
      {pool.explanation.length > 0 && (
        <details>
          <summary>The arithmetic of this decision</summary>
          <pre tabIndex={0} aria-label={`arithmetic of pool ${pool.pool}`}>{pool.explanation.join("\n")}</pre>
        </details>
      )}
    </Card>
  );
}

/** The decisions that changed how many workers the pool should have. */
function Changes(props: { pool: string; decided: number }) {
  const loaded = useLoaded((abort) => get<{ changes: PoolScale[] }>(admin("scale", props.pool, "changes"), abort), [props.pool, props.decided]);
  return (
    <details open>
      <summary>What was decided before</summary>
      <Pending of={loaded} />
      {loaded.value && (
        <Table label={`decisions of pool ${props.pool}`} rows={loaded.value.changes} keyOf={(one) => String(one.decided_at)} rowsOfPage={10} empty="Nothing has changed yet." columns={[
          { name: "When", cell: (one) => <Ago at={one.decided_at} /> },
          { name: "Wanted", cell: (one) => count(one.wanted), right: true },
          { name: "Why", cell: (one) => REASONS[one.reason] ?? one.reason, long: true },
          { name: "Arriving rows", cell: (one) => rate(one.arrival_rows_per_s), right: true },
          { name: "Waiting rows", cell: (one) => count(one.queue_rows), right: true },
        ]} />
      )}
    </details>
  );
}
