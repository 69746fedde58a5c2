// Which workers hold a model, why, and what memory it takes.
import { admin, get } from "../api";
import { workerName } from "../documents";
import { useLoaded } from "../loaded";
import { Table } from "../table";
import { Card, Pending } from "../ui";
import type { TabProps } from "./model";
import { heldColumns, placedColumns, type Placement } from "./placement";

export function WhereTab({ model }: TabProps) {
  const placement = useLoaded((abort) => get<Placement>(`${admin("placement")}?model=${encodeURIComponent(model.name)}`, abort), [model.name], 5);
  const held = placement.value?.workers.flatMap((worker) => worker.instances.map((one) => ({ worker, one }))) ?? [];
  return (
    <>
      <Pending of={placement} />
      {placement.value && (
        <div class="cards">
          <Card title="Workers that hold it" wide>
            <Table label="workers that hold the model" rows={held} keyOf={(row) => `${row.worker.id} ${row.one.version}`}
              empty="No worker holds it now. Its first call makes one load it, unless it is unloaded or failed." columns={[
                { name: "Worker", cell: ({ worker }) => <span title={worker.id}>{workerName(worker.id)}, pool {worker.pool}</span>, by: ({ worker }) => worker.id },
                { name: "Version", cell: ({ one }) => one.version, by: ({ one }) => one.version, right: true },
                ...heldColumns(held.some(({ one }) => one.device_size_bytes > 0)),
              ]} />
          </Card>
          <Card title="Its versions" wide>
            <Table label="placement of the versions" rows={placement.value.models} keyOf={(row) => String(row.version)} columns={placedColumns} empty="No version can be loaded." />
          </Card>
        </div>
      )}
    </>
  );
}
