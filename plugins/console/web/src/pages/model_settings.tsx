// Where and how often a model is loaded, its labels and owner.
import { useEffect, useState } from "preact/hooks";
import { admin, get, send, session } from "../api";
import { Button, Card, ErrorLine, useKept, useLoaded } from "../ui";
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
  const path = admin("models", model.name);
  const { value, error, reload } = useLoaded((abort) => get<Settings>(`${path}/settings`, abort), [model.name]);
  const [kept, keep] = useKept(`settings ${model.name}`);
  const [wrong, setWrong] = useState<unknown>(null);
  const write = session.value?.can.write ?? false;
  useEffect(() => setWrong(null), [kept]);
  if (!value) return <ErrorLine error={error} again={reload} />;
  const draft = kept ? (JSON.parse(kept) as Draft) : draftOf(value.settings);
  const set = (change: Partial<Draft>) => keep(JSON.stringify({ ...draft, ...change }));
  const save = (event: Event) => {
    event.preventDefault();
    try {
      const changes = changesOf(draft, value.settings);
      if (!Object.keys(changes).length) return keep("");
      ask({
        title: `Change the settings of ${model.name}?`,
        action: "Save",
        means: (
          <>
            <p>They take effect at once, and hold for each of its versions that serves. Workers load or unload it without failing a call.</p>
            <ul>{Object.entries(changes).map(([name, to]) => <li key={name}>{`${name}: ${JSON.stringify(to)}`}</li>)}</ul>
          </>
        ),
        run: async () => {
          await send("PATCH", path, changes);
          keep("");
          reload();
        },
      });
    } catch (failure) {
      setWrong(failure);
    }
  };
  const number = (name: "instances_min" | "instances_max" | "idle_s", title: string, hint: string, most: number) => (
    <>
      <label for={name}>{title}</label>
      <input id={name} type="number" min={0} max={most} step={name === "idle_s" ? "any" : 1} required value={draft[name]} disabled={!write}
        aria-describedby={`${name}-hint`} onInput={(event) => set({ [name]: event.currentTarget.value })} />
      <p class="hint" id={`${name}-hint`}>{hint}</p>
    </>
  );
  return (
    <Card title="Settings of the endpoint">
      {value.warnings.map((text) => <p class="note" key={text}>{text}</p>)}
      <form onSubmit={save}>
        {number("instances_min", "Instances that are always loaded", "0: it is loaded by its first call.", 1024)}
        {number("instances_max", "Most instances in a pool", "0: no limit.", 1024)}
        {number("idle_s", "Seconds without a call until it is unloaded", "0: only if memory is short.", 31_536_000)}
        <label class="line">
          <input type="checkbox" checked={draft.pin} disabled={!write} onChange={(event) => set({ pin: event.currentTarget.checked })} />
          Pinned: a loaded instance stays, also when memory is short
        </label>
        <label for="pools">Pools</label>
        <input id="pools" value={draft.pools} disabled={!write} aria-describedby="pools-hint" onInput={(event) => set({ pools: event.currentTarget.value })} />
        <p class="hint" id="pools-hint">The preferred one first, with commas between; empty: those of the version.</p>
        <label for="labels">Labels</label>
        <textarea id="labels" value={draft.labels} disabled={!write} aria-describedby="labels-hint" onInput={(event) => set({ labels: event.currentTarget.value })} />
        <p class="hint" id="labels-hint">NAME=VALUE, one a line.</p>
        {session.value?.can.keys && (
          <>
            <label for="owner">Owner</label>
            <input id="owner" value={draft.owner} disabled={!write} aria-describedby="owner-hint" onInput={(event) => set({ owner: event.currentTarget.value })} />
            <p class="hint" id="owner-hint">Name of an API key, whose limit of memory counts it; empty: none.</p>
          </>
        )}
        <ErrorLine error={wrong} />
        {write ? (
          <div class="actions">
            <Button type="submit" kind="main" disabled={!kept}>Save…</Button>
            {kept && <Button onClick={() => keep("")}>Discard changes</Button>}
          </div>
        ) : (
          <p class="hint">Your key may not change them.</p>
        )}
      </form>
    </Card>
  );
}
