// Where and how often a model is loaded, its labels and owner.
import { useState } from "preact/hooks";
import { admin, get, send, session } from "../api";
import { Check, Field } from "../fields";
import { useDraft, useLoaded } from "../loaded";
import { Button, Card, ErrorLine, Pending } from "../ui";
import type { TabProps } from "./model";

interface Placement {
  pools: string[];
  instances_min: number;
  instances_max: number;
  idle_s: number;
  pin: boolean;
  owner: string;
  labels: Record<string, string>;
}
interface Settings {
  settings: Placement;
  warnings: string[];
}
/** The fields as they are written. */
interface Draft {
  pools: string;
  instances_min: string;
  instances_max: string;
  idle_s: string;
  pin: boolean;
  owner: string;
  labels: string;
}

function draftOf(settings: Placement): Draft {
  return {
    pools: settings.pools.join(", "),
    instances_min: String(settings.instances_min),
    instances_max: String(settings.instances_max),
    idle_s: String(settings.idle_s),
    pin: settings.pin,
    owner: settings.owner,
    labels: Object.entries(settings.labels).map(([name, value]) => `${name}=${value}`).join("\n"),
  };
}

/** The fields that differ, as the server takes them. Throws Error for a line that is no label. */
function changesOf(draft: Draft, first: Placement): Record<string, unknown> {
  const unchanged = draftOf(first);
  const changes: Record<string, unknown> = {};
  for (const name of ["instances_min", "instances_max", "idle_s"] as const) {
    if (draft[name] !== unchanged[name]) changes[name] = Number(draft[name] || 0);
  }
  if (draft.pin !== unchanged.pin) changes.pin = draft.pin;
  if (draft.owner !== unchanged.owner) changes.owner = draft.owner.trim();
  if (draft.pools !== unchanged.pools) changes.pools = draft.pools.split(/[\s,]+/).filter(Boolean);
  if (draft.labels !== unchanged.labels) {
    const labels: Record<string, string | null> = Object.fromEntries(Object.keys(first.labels).map((name) => [name, null]));
    for (const line of draft.labels.split("\n").filter((one) => one.trim())) {
      const at = line.indexOf("=");
      if (at < 1) throw new Error(`"${line}" is no label: write NAME=VALUE`);
      labels[line.slice(0, at).trim()] = line.slice(at + 1).trim();
    }
    changes.labels = labels;
  }
  return changes;
}

export function SettingsTab({ model, ask }: TabProps) {
  const loaded = useLoaded((abort) => get<Settings>(`${admin("models", model.name)}/settings`, abort), [model.name]);
  return loaded.value ? <SettingsForm name={model.name} found={loaded.value} ask={ask} reload={loaded.reload} /> : <Pending of={loaded} />;
}

function SettingsForm({ name, found, ask, reload }: { name: string; found: Settings; reload: () => void } & Pick<TabProps, "ask">) {
  const [draft, set, forget, changed] = useDraft(`settings ${name}`, draftOf(found.settings));
  const [wrong, setWrong] = useState<unknown>(null);
  const disabled = !(session.value?.can.write ?? false);
  const save = (event: Event) => {
    event.preventDefault();
    setWrong(null);
    try {
      const changes = changesOf(draft, found.settings);
      if (!Object.keys(changes).length) return forget();
      ask({
        title: `Change the settings of ${name}?`,
        action: "Save",
        means: (
          <>
            <p>They take effect at once, and hold for each of its versions that serves. Workers load or unload it without failing a call.</p>
            <ul>{Object.entries(changes).map(([field, to]) => <li key={field}>{`${field}: ${JSON.stringify(to)}`}</li>)}</ul>
          </>
        ),
        run: async () => {
          await send("PATCH", admin("models", name), changes);
          forget();
          reload();
        },
      });
    } catch (failure) {
      setWrong(failure);
    }
  };
  const text = (field: Exclude<keyof Draft, "pin">) => ({ value: draft[field], disabled, onText: (value: string) => set({ [field]: value }) });
  return (
    <Card title="Settings of the endpoint">
      {found.warnings.map((warning) => <p class="note" key={warning}>{warning}</p>)}
      <form onSubmit={save}>
        <Field title="Instances that are always loaded" hint="0: it is loaded by its first call." type="number" min={0} max={1024} step={1} required {...text("instances_min")} />
        <Field title="Most instances in a pool" hint="0: no limit." type="number" min={0} max={1024} step={1} required {...text("instances_max")} />
        <Field title="Seconds without a call until it is unloaded" hint="0: only if memory is short." type="number" min={0} max={31_536_000} step="any" required {...text("idle_s")} />
        <Check title="Pinned: a loaded instance stays, also when memory is short" checked={draft.pin} disabled={disabled} onCheck={(pin) => set({ pin })} />
        <Field title="Pools" hint="The preferred one first, with commas between; empty: those of the version." {...text("pools")} />
        <Field title="Labels" hint="NAME=VALUE, one a line." lines={3} {...text("labels")} />
        {session.value?.can.keys && <Field title="Owner" hint="Name of an API key, whose limit of memory counts it; empty: none." {...text("owner")} />}
        <ErrorLine error={wrong} />
        {disabled ? (
          <p class="hint">Your key may not change them.</p>
        ) : (
          <div class="actions">
            <Button type="submit" kind="main" disabled={!changed}>Save…</Button>
            {changed && <Button onClick={forget}>Discard changes</Button>}
          </div>
        )}
      </form>
    </Card>
  );
}
