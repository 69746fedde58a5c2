// Which workers hold a model, why, and what memory it takes.
import { admin, get } from "../api";
import { stateWords } from "../documents";
import { Badge, Bar, Card, ErrorLine, Table, useLoaded } from "../ui";
import { ago, bytes, seconds } from "../units";
import type { TabProps } from "./model";

interface Memory {
  size_bytes: number;
  peak_bytes: number;
  device_size_bytes: number;
  device_peak_bytes: number;
  load_s: number;
}
interface Held extends Memory {
  version: number;
  state: string;
  reason: string | null;
  loaded_age_s: number | null;
  last_used_age_s: number | null;
  in_use: boolean;
  pinned: boolean;
  why: string;
}
interface PlacedVersion {
  version: number;
  active: boolean;
  state: string;
  reason: string | null;
  pools: string[];
  failed: { worker: string; reason: string }[];
  load: (Memory & { pool: string; measured: boolean }) | null;
  refusals: { worker: string; reason: string; retry_after_s: number }[];
  missing: string | null;
}
interface Placement {
  workers: { id: string; pool: string; device: string; budget_bytes: number | null; used_bytes: number; instances: Held[] }[];
  models: PlacedVersion[];
}

function memoryText(one: Memory): string {
  const device = one.device_size_bytes ? ` and ${bytes(one.device_size_bytes)} of the accelerator` : "";
  return one.size_bytes || one.device_size_bytes ? `${bytes(one.size_bytes)}${device}` : "not measured yet";
}

function age(value: number | null): string {
  return ago(value === null ? null : Date.now() / 1000 - value);
}

export function WhereTab({ model }: TabProps) {
  const { value, error, reload } = useLoaded(
    (abort) => get<Placement>(`${admin("placement")}?model=${encodeURIComponent(model.name)}`, abort),
    [model.name],
    5,
  );
  if (!value) return <ErrorLine error={error} again={reload} />;
  const held = value.workers.flatMap((worker) => worker.instances.map((one) => ({ worker, one })));
  return (
    <>
      <ErrorLine error={error} again={reload} />
      <div class="cards">
        <Card title="Workers that hold it" wide>
          <Table label="workers that hold the model" rows={held} keyOf={(row) => `${row.worker.id} ${row.one.version}`}
            empty="No worker holds it now. Its first call makes one load it, unless it is unloaded or failed." columns={[
              { name: "Worker", cell: ({ worker }) => worker.id, by: ({ worker }) => worker.id },
              { name: "Pool", cell: ({ worker }) => `${worker.pool}, ${worker.device}` },
              { name: "Version", cell: ({ one }) => one.version, by: ({ one }) => one.version, right: true },
              {
                name: "State",
                cell: ({ one }) => {
                  const [kind, words] = stateWords(one.state);
                  return (
                    <>
                      <Badge kind={kind}>{words}</Badge> {one.in_use && <Badge>in use</Badge>} {one.pinned && <Badge>pinned</Badge>}
                      {one.reason && <div class="hint">{one.reason}</div>}
                    </>
                  );
                },
              },
              { name: "Why", cell: ({ one }) => one.why || "–" },
              { name: "Loaded", cell: ({ one }) => <span title={one.load_s ? `the load took ${seconds(one.load_s)}` : ""}>{age(one.loaded_age_s)}</span>, by: ({ one }) => one.loaded_age_s },
              { name: "Last call", cell: ({ one }) => age(one.last_used_age_s), by: ({ one }) => one.last_used_age_s },
              {
                name: "Memory",
                cell: ({ worker, one }) => (
                  <>
                    {worker.budget_bytes ? <Bar used={one.size_bytes} total={worker.budget_bytes} label={`${memoryText(one)} of ${bytes(worker.budget_bytes)}`} /> : memoryText(one)}
                    <div class="hint">{one.peak_bytes ? `and up to ${bytes(one.peak_bytes)} more while it runs` : ""}</div>
                  </>
                ),
                by: ({ one }) => one.size_bytes,
              },
            ]} />
        </Card>
        {value.models.map((one) => <Version key={one.version} one={one} />)}
      </div>
    </>
  );
}

function Version({ one }: { one: PlacedVersion }) {
  const [kind, words] = stateWords(one.state);
  return (
    <Card title={`Version ${one.version}`} aside={<Badge kind={kind}>{words}</Badge>}>
      <dl class="pairs">
        <dt>Pools</dt><dd>{one.pools.join(", ")}</dd>
        {one.reason && <><dt>Reason</dt><dd>{one.reason}</dd></>}
        {one.missing && <><dt>Too few are loaded</dt><dd>{one.missing}</dd></>}
        {one.load && (
          <>
            <dt>A load takes</dt>
            <dd>
              {memoryText(one.load)}{one.load.load_s ? `, ${seconds(one.load.load_s)}` : ""} in pool {one.load.pool}
              {one.load.measured ? ", as measured before" : ", as predicted from its files"}
            </dd>
          </>
        )}
        {one.refusals.map((at) => <><dt>{at.worker} does not load it</dt><dd>{at.reason}; it may be tried again in {seconds(at.retry_after_s)}</dd></>)}
        {one.failed.map((at) => <><dt>Failed in {at.worker}</dt><dd>{at.reason}</dd></>)}
      </dl>
    </Card>
  );
}
