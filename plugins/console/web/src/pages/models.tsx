import { admin, get, session } from "../api";
import { labelsText, modelState, stateWords, type Model } from "../documents";
import { overview, type Endpoint } from "../live";
import { link, place, setQuery } from "../router";
import { Badge, Card, Empty, ErrorLine, Table, useLoaded, type Column } from "../ui";
import { count, rate, seconds } from "../units";

interface Row {
  model: Model;
  state: string;
  /** Of all versions together; null: no figures are known. */
  requests: number | null;
  failed: number | null;
  p99: number | null;
  /** What the filter looks at, in small letters. */
  text: string;
}

/** The largest of what is known; traffic is a sum, latency the slowest version's. */
function worst(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? Math.max(...known) : null;
}

function sum(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
}

function rowsOf(models: Model[], endpoints: Endpoint[]): Row[] {
  const traffic = new Map<string, Endpoint[]>();
  for (const one of endpoints) traffic.set(one.model, [...(traffic.get(one.model) ?? []), one]);
  return models.map((model) => {
    const of = traffic.get(model.name) ?? [];
    return {
      model,
      state: modelState(model),
      requests: sum(of.map((one) => one.requests_per_s)),
      failed: sum(of.map((one) => one.failed_per_s)),
      p99: worst(of.map((one) => one.p99_s)),
      text: `${model.name} ${model.owner} ${labelsText(model.labels)}`.toLowerCase(),
    };
  });
}

function workers(model: Model): string[] {
  return [...new Set(model.versions.flatMap((one) => one.instances.filter((at) => at.state !== "failed").map((at) => at.worker)))];
}

function Loaded(props: { model: Model }) {
  const names = workers(props.model);
  if (!names.length) return <>–</>;
  return <span title={names.join(", ")}>{names.length > 2 ? `${names.length} workers` : names.join(", ")}</span>;
}

function Versions(props: { model: Model }) {
  const { model } = props;
  const total = model.versions.length;
  return (
    <>
      {model.serving ?? "none"}
      {model.active !== null && model.active !== model.serving && !model.unloaded && `, ${model.active} takes over`}
      {total > 1 && <small class="hint"> of {count(total)}</small>}
    </>
  );
}

const COLUMNS: Column<Row>[] = [
  { name: "Model", cell: ({ model }) => <a href={link(["models", model.name])}>{model.name}</a>, by: ({ model }) => model.name },
  {
    name: "State",
    cell: ({ state }) => {
      const [kind, words] = stateWords(state);
      return <Badge kind={kind}>{words}</Badge>;
    },
    by: ({ state }) => state,
  },
  { name: "Serves", cell: ({ model }) => <Versions model={model} />, by: ({ model }) => model.serving },
  { name: "Loaded by", cell: ({ model }) => <Loaded model={model} />, by: ({ model }) => workers(model).length },
  { name: "Requests", cell: (row) => rate(row.requests), by: (row) => row.requests, right: true },
  { name: "Failed", cell: (row) => (row.failed ? <Badge kind="bad">{rate(row.failed)}</Badge> : rate(row.failed)), by: (row) => row.failed, right: true },
  { name: "p99", cell: (row) => seconds(row.p99), by: (row) => row.p99, right: true },
  { name: "Owner", cell: ({ model }) => model.owner || "–", by: ({ model }) => model.owner },
  { name: "Labels", cell: ({ model }) => Object.entries(model.labels).map(([name, value]) => <Badge key={name}>{`${name}=${value}`}</Badge>) },
];

const STATES = ["ready", "standby", "loading", "failed", "unloaded"];

function shown(row: Row, text: string, state: string): boolean {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (!state || row.state === state) && words.every((word) => row.text.includes(word));
}

export function ModelsPage() {
  return session.value?.can.read ? <AllModels /> : <CallableModels />;
}

function AllModels() {
  const { value, error, reload } = useLoaded((abort) => get<{ models: Model[] }>(admin("models"), abort), [], 30);
  const text = place.value.query.get("q") ?? "";
  const state = place.value.query.get("state") ?? "";
  const rows = rowsOf(value?.models ?? [], overview.value?.endpoints ?? []);
  const found = rows.filter((row) => shown(row, text, state));
  return (
    <>
      <Head />
      <div class="filters">
        <input type="search" aria-label="Filter by name, label or owner" placeholder="Name, label or owner" value={text}
          onInput={(event) => setQuery({ q: event.currentTarget.value, state })} />
        <select aria-label="State" value={state} onChange={(event) => setQuery({ q: text, state: event.currentTarget.value })}>
          <option value="">Any state</option>
          {STATES.map((name) => <option key={name} value={name}>{stateWords(name)[1]}</option>)}
        </select>
        <span class="hint" role="status">
          {value && (found.length === rows.length ? `${count(rows.length)} ${rows.length === 1 ? "model" : "models"}` : `${count(found.length)} of ${count(rows.length)} models`)}
        </span>
      </div>
      <ErrorLine error={error} again={reload} />
      {value && (
        <Card>
          <Table label="models" columns={COLUMNS} rows={found} keyOf={(row) => row.model.name} sort="Model"
            empty={rows.length ? "No model is like that." : "There is no model yet. Upload one, or drop a file on the upload page."} />
        </Card>
      )}
      {!value && !error && <Empty>Loading the models…</Empty>}
    </>
  );
}

function Head() {
  return (
    <div class="head">
      <h1>Models</h1>
      {session.value?.can.write && <a class="button main" href="#/upload">Upload a model</a>}
    </div>
  );
}

/** For keys that may call models and not read all about them. */
function CallableModels() {
  const { value, error, reload } = useLoaded((abort) => get<{ models: string[] }>("call/v2/models", abort), [], 30);
  const text = place.value.query.get("q") ?? "";
  const found = (value?.models ?? []).filter((name) => name.toLowerCase().includes(text.toLowerCase()));
  return (
    <>
      <Head />
      <div class="filters">
        <input type="search" aria-label="Filter by name" placeholder="Name" value={text} onInput={(event) => setQuery({ q: event.currentTarget.value })} />
      </div>
      <ErrorLine error={error} again={reload} />
      {value && (
        <Card>
          <Table label="models" rows={found} keyOf={(name) => name} sort="Model" empty="Your key may call no model that answers now."
            columns={[{ name: "Model", cell: (name) => <a href={link(["models", name])}>{name}</a>, by: (name) => name }]} />
        </Card>
      )}
    </>
  );
}
