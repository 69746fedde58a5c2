import { admin, ApiError, get, send, session } from "../api";
import { labelsText, modelState, stateWords, workerName, type Model } from "../documents";
import { Field } from "../fields";
import { overview, type Endpoint } from "../live";
import { useLoaded } from "../loaded";
import { link, place, setQuery } from "../router";
import { Table, type Column } from "../table";
import { Badge, Card, Head, Pending, State } from "../ui";
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
  return <span title={names.join(", ")}>{names.length > 2 ? `${names.length} workers` : names.map(workerName).join(", ")}</span>;
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
  { name: "State", cell: ({ state }) => <State of={state} />, by: ({ state }) => state },
  { name: "Serves", cell: ({ model }) => <Versions model={model} />, by: ({ model }) => model.serving },
  { name: "Loaded by", cell: ({ model }) => <Loaded model={model} />, by: ({ model }) => workers(model).length },
  { name: "Requests", cell: (row) => rate(row.requests), by: (row) => row.requests, right: true },
  { name: "Failed", cell: (row) => (row.failed ? <Badge kind="bad">{rate(row.failed)}</Badge> : rate(row.failed)), by: (row) => row.failed, right: true },
  { name: "p99", cell: (row) => seconds(row.p99), by: (row) => row.p99, right: true },
  { name: "Owner", cell: ({ model }) => model.owner || "–", by: ({ model }) => model.owner },
  { name: "Labels", cell: ({ model }) => Object.entries(model.labels).map(([name, value]) => <Badge key={name}>{`${name}=${value}`}</Badge>) },
];

const STATES = ["ready", "standby", "loading", "failed", "unloaded"];

function shown(text: string, filter: string): boolean {
  return filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

export function ModelsPage() {
  return (
    <>
      <Head title="Models">{session.value?.can.write && <a class="button main" href="#/upload">Upload a model</a>}</Head>
      {session.value?.can.read ? <AllModels /> : <CallableModels />}
    </>
  );
}

function AllModels() {
  const models = useLoaded((abort) => get<{ models: Model[] }>(admin("models"), abort), [], 30);
  const q = place.value.query.get("q") ?? "";
  const state = place.value.query.get("state") ?? "";
  const rows = rowsOf(models.value?.models ?? [], overview.value?.endpoints ?? []);
  const found = rows.filter((row) => (!state || row.state === state) && shown(row.text, q));
  return (
    <>
      <div class="filters">
        <Field title="Name, label or owner" type="search" value={q} onText={(text) => setQuery({ q: text, state })} />
        <Field title="State" value={state} options={[["", "any"], ...STATES.map((name): [string, string] => [name, stateWords(name)[1]])]} onText={(one) => setQuery({ q, state: one })} />
        <span class="hint" role="status">
          {models.value && (found.length === rows.length ? `${count(rows.length)} ${rows.length === 1 ? "model" : "models"}` : `${count(found.length)} of ${count(rows.length)} models`)}
        </span>
      </div>
      <Pending of={models} />
      {models.value && (
        <Card>
          <Table label="models" columns={COLUMNS} rows={found} keyOf={(row) => row.model.name} sort="Model"
            empty={rows.length ? "No model is like that." : "There is no model yet. Upload one, or drop a file on the upload page."} />
        </Card>
      )}
    </>
  );
}

interface Callable {
  name: string;
  version: string;
  state: string;
  reason?: string;
}

/** The models that the caller may call: with their states where the server has Triton's index, else by name alone. */
async function callable(abort: AbortSignal): Promise<Callable[]> {
  try {
    return await send<Callable[]>("POST", "call/v2/repository/index", {}, abort);
  } catch (failure) {
    if (!(failure instanceof ApiError) || failure.status !== 404) throw failure;
    const { models } = await get<{ models: string[] }>("call/v2/models", abort);
    return models.map((name) => ({ name, version: "", state: "READY" }));
  }
}

/** For callers that may call models and not read all about them. */
function CallableModels() {
  const models = useLoaded(callable, [], 10);
  const q = place.value.query.get("q") ?? "";
  const found = (models.value ?? []).filter((one) => shown(one.name.toLowerCase(), q));
  return (
    <>
      <div class="filters">
        <Field title="Name" type="search" value={q} onText={(text) => setQuery({ q: text })} />
      </div>
      <Pending of={models} />
      {models.value && (
        <Card>
          <Table label="models" rows={found} keyOf={(one) => `${one.name} ${one.version}`} sort="Model"
            empty={models.value.length ? "No model is like that." : "There is no model here that you may call."}
            columns={[
              { name: "Model", cell: (one) => <a href={link(["models", one.name])}>{one.name}</a>, by: (one) => one.name },
              { name: "Version", cell: (one) => one.version || "–", by: (one) => one.version, right: true },
              { name: "State", cell: (one) => <State of={one.state.toLowerCase()} />, by: (one) => one.state },
              { name: "Why", cell: (one) => one.reason ?? "", long: true },
            ]} />
        </Card>
      )}
    </>
  );
}
