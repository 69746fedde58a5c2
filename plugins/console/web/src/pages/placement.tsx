// Where versions are loaded and why, as the page of workers and that of a model show it.
import { link } from "../router";
import type { Column } from "../table";
import { Badge, Bar, State } from "../ui";
import { ago, bytes, seconds } from "../units";

export interface Instance {
  model: string;
  version: number;
  state: string;
  reason: string | null;
  size_bytes: number;
  peak_bytes: number;
  device_size_bytes: number;
  load_s: number;
  loaded_age_s: number | null;
  last_used_age_s: number | null;
  in_use: boolean;
  pinned: boolean;
  why: string;
}
export interface Holder {
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
export interface Placed {
  model: string;
  version: number;
  state: string;
  reason: string | null;
  pools: string[];
  holders: string[];
  failed: { worker: string; reason: string }[];
  standby: boolean;
  load: { size_bytes: number; peak_bytes: number; load_s: number; measured: boolean } | null;
  refusals: { worker: string; kind: string; reason: string; retry_after_s: number }[];
  missing: string | null;
}
export interface Placement {
  leader: { name: string; token: number } | null;
  workers: Holder[];
  models: Placed[];
  next_page_token: string | null;
}
export interface Held {
  worker: Holder;
  one: Instance;
}

export function isHeldUp(row: Placed): boolean {
  return !!row.missing || row.refusals.length > 0 || row.failed.length > 0 || row.state === "failed";
}

function age(value: number | null, none: string) {
  return value == null ? none : ago(Date.now() / 1000 - value);
}

export const modelColumn: Column<{ model: string; version: number }> = {
  name: "Model",
  cell: (row) => <><a href={link(["models", row.model])}>{row.model}</a> {row.version}</>,
  by: (row) => `${row.model} ${row.version}`,
};

/** The columns of what workers hold, after those that say which worker or model. `device`: whether some have an accelerator's memory. */
export function heldColumns(device: boolean): Column<Held>[] {
  const memory = (used: number, total: number | null) => <Bar used={used} total={total} label={bytes(used)} />;
  return [
    { name: "State", cell: ({ one }) => <><State of={one.state} />{one.reason && <div class="hint">{one.reason}</div>}</>, by: ({ one }) => one.state },
    {
      name: "Memory",
      cell: ({ worker, one }) => <>{memory(one.size_bytes, worker.budget_bytes)}{one.peak_bytes > 0 && <div class="hint">up to {bytes(one.peak_bytes)} more while it runs</div>}</>,
      by: ({ one }) => one.size_bytes,
    },
    ...(device ? [{ name: "Device memory", cell: ({ worker, one }: Held) => memory(one.device_size_bytes, worker.device_budget_bytes), by: ({ one }: Held) => one.device_size_bytes }] : []),
    { name: "Why it is here", cell: ({ one }) => <>{one.why || "–"} {one.pinned && <Badge>pinned</Badge>}</>, by: ({ one }) => one.why, long: true },
    { name: "Last call", cell: ({ one }) => (one.in_use ? <Badge kind="good">in use</Badge> : age(one.last_used_age_s, "none yet")), by: ({ one }) => one.last_used_age_s },
    { name: "Loaded", cell: ({ one }) => age(one.loaded_age_s, "–"), by: ({ one }) => one.loaded_age_s },
    { name: "Load took", cell: ({ one }) => (one.load_s ? seconds(one.load_s) : "–"), by: ({ one }) => one.load_s, right: true },
  ];
}

/** What stands in the way of a version, or how it gets loaded. */
function Why({ row }: { row: Placed }) {
  return (
    <>
      {row.missing && <div>{row.missing}</div>}
      {row.reason && <div>{row.reason}</div>}
      {row.refusals.map((one) => <div key={one.worker}>{one.worker} refused ({one.kind}): {one.reason}. Next try in {seconds(one.retry_after_s)}.</div>)}
      {row.failed.map((one) => <div key={one.worker}>{one.worker} could not load it: {one.reason}</div>)}
      {!isHeldUp(row) && <div>{row.holders.length ? "Nothing: it is loaded." : "Its first call makes a worker load it."}</div>}
    </>
  );
}

export const placedColumns: Column<Placed>[] = [
  modelColumn,
  { name: "State", cell: (row) => <State of={row.state} />, by: (row) => row.state },
  { name: "What it waits for", cell: (row) => <Why row={row} />, long: true },
  { name: "Pools", cell: (row) => row.pools.join(", ") },
  {
    name: "A load takes",
    cell: (row) => (row.load ? <>{row.load.measured ? "" : "about "}{bytes(row.load.size_bytes + row.load.peak_bytes)}{row.load.load_s > 0 && `, ${seconds(row.load.load_s)}`}</> : "–"),
    by: (row) => row.load && row.load.size_bytes + row.load.peak_bytes,
  },
];
