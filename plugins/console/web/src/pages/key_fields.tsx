// The form of a key's scopes, limits and quotas, and what it sends.
import { Check, Field } from "../fields";
import { bytes, count, rate } from "../units";

export interface Key {
  id: string;
  name: string;
  generation: number;
  scopes: string[];
  limits: Record<string, number | null>;
  priority_max: number | null;
  created_at: number;
  expires_at: number | null;
  revoked_at: number | null;
  state: string;
  memory_taken_bytes: number;
  secrets: { created_at: number; expires_at: number | null }[];
}

/** What stands in the form: texts, as typed. Globs are separated by spaces or commas. */
export interface Draft {
  name: string;
  infer: string;
  read: string;
  write: string;
  plain: string[];
  limits: Record<string, string>;
  priority: string;
  days: string;
}

const GIB = 2 ** 30;
const LIMITS: { field: string; title: string; size?: number; whole?: boolean; text: (value: number) => string }[] = [
  { field: "requests_per_s", title: "Calls a second", text: (value) => `${rate(value)} calls` },
  { field: "concurrency", title: "Calls at the same time", whole: true, text: (value) => `${count(value)} calls at the same time` },
  { field: "rows_per_s", title: "Rows a second", text: (value) => `${rate(value)} rows` },
  { field: "compute_s_per_minute", title: "Seconds of runs a minute", text: (value) => `${value} s of runs a minute` },
  { field: "models", title: "Models that it owns", whole: true, text: (value) => `${count(value)} models` },
  { field: "disk_bytes", title: "Files of its models, GiB", size: GIB, text: (value) => `${bytes(value)} of files` },
  { field: "memory_bytes", title: "Memory of its models, GiB", size: GIB, text: (value) => `${bytes(value)} of memory` },
  { field: "uploads", title: "Uploads at the same time", whole: true, text: (value) => `${count(value)} uploads at the same time` },
];
const GLOBS = [
  { field: "infer", prefix: "infer", title: "Call the models" },
  { field: "read", prefix: "models:read", title: "Read all about the models" },
  { field: "write", prefix: "models:write", title: "Upload, change and delete the models" },
] as const;
const PLAIN = [
  ["metrics", "Read metrics, requests and logs"],
  ["shared-memory", "Register shared memory"],
  ["admin", "Everything, also keys"],
] as const;

export const NEW_DRAFT: Draft = { name: "", infer: "*", read: "", write: "", plain: [], limits: {}, priority: "", days: "" };

export function limitsText(key: Key): string[] {
  const found = LIMITS.flatMap((one) => (key.limits[one.field] == null ? [] : [one.text(key.limits[one.field] as number)]));
  return [...found, ...(key.priority_max ? [`priority ${key.priority_max} at most`] : [])];
}

export function draftOf(key: Key): Draft {
  const globs = (prefix: string) =>
    key.scopes.flatMap((scope) => (scope === prefix ? ["*"] : scope.startsWith(`${prefix}:`) ? [scope.slice(prefix.length + 1)] : [])).join(" ");
  return {
    name: key.name,
    infer: globs("infer"),
    read: globs("models:read"),
    write: globs("models:write"),
    plain: PLAIN.map(([scope]) => scope as string).filter((scope) => key.scopes.includes(scope)),
    limits: Object.fromEntries(
      LIMITS.map(({ field, size = 1 }) => [field, key.limits[field] == null ? "" : String((key.limits[field] as number) / size)]),
    ),
    priority: key.priority_max == null ? "" : String(key.priority_max),
    days: "",
  };
}

function scopesOf(draft: Draft): string[] {
  const globs = GLOBS.flatMap(({ field, prefix }) => draft[field].split(/[\s,]+/).filter(Boolean).map((glob) => `${prefix}:${glob}`));
  return [...globs, ...draft.plain];
}

function limitsOf(draft: Draft): Record<string, number | null> {
  return Object.fromEntries(
    LIMITS.map(({ field, size }) => {
      const text = draft.limits[field] ?? "";
      return [field, text === "" ? null : size ? Math.round(Number(text) * size) : Number(text)];
    }),
  );
}

function rest(draft: Draft) {
  return { scopes: scopesOf(draft), limits: limitsOf(draft), priority_max: draft.priority === "" ? null : Number(draft.priority) };
}

export function newKeyOf(draft: Draft) {
  return { name: draft.name.trim(), ...rest(draft), ...(draft.days ? { expires_in_s: 86_400 * Number(draft.days) } : {}) };
}

/** Only what differs, so that a change of another field by somebody else stays. */
export function changesOf(key: Key, draft: Draft) {
  const all = rest(draft);
  const before = rest(draftOf(key));
  const limits = Object.fromEntries(Object.entries(all.limits).filter(([field, value]) => value !== before.limits[field]));
  return {
    ...(all.scopes.join() === before.scopes.join() ? {} : { scopes: all.scopes }),
    ...(Object.keys(limits).length ? { limits } : {}),
    ...(all.priority_max === before.priority_max ? {} : { priority_max: all.priority_max }),
    ...(draft.days === "" ? {} : { expires_in_s: Number(draft.days) ? 86_400 * Number(draft.days) : null }),
  };
}

export function KeyFields(props: { draft: Draft; set: (change: Partial<Draft>) => void }) {
  const { draft, set } = props;
  const everything = draft.plain.includes("admin");
  return (
    <>
      <fieldset>
        <legend>It may</legend>
        {GLOBS.map(({ field, title }) => (
          <Field key={field} title={title} value={draft[field]} disabled={everything} pattern="[A-Za-z0-9._\-*?,\s]*" says="names of models, * for any characters"
            onText={(text) => set({ [field]: text })} />
        ))}
        <p class="hint">Names with * and ?, separated by spaces; empty: none.</p>
        {PLAIN.map(([scope, title]) => (
          <Check key={scope} title={title} checked={draft.plain.includes(scope)}
            onCheck={(checked) => set({ plain: checked ? [...draft.plain, scope] : draft.plain.filter((one) => one !== scope) })} />
        ))}
      </fieldset>
      <fieldset>
        <legend>Limits and quotas, over all gateways; empty: none</legend>
        <div class="fields">
          {LIMITS.map(({ field, title, whole }) => (
            <Field key={field} title={title} type="number" min={whole ? 1 : 0} step={whole ? 1 : "any"} value={draft.limits[field] ?? ""}
              onText={(text) => set({ limits: { ...draft.limits, [field]: text } })} />
          ))}
          <Field title="Highest priority (1 is the highest)" type="number" min={1} step={1} value={draft.priority} onText={(priority) => set({ priority })} />
          <Field title="Ends after days from now" type="number" min={0} step="any" value={draft.days} onText={(days) => set({ days })} />
        </div>
      </fieldset>
    </>
  );
}
