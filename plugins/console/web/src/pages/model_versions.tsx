// What a model is: its versions, their signature in words, how they batch and why, and what went wrong.
import { admin, get, send, session } from "../api";
import { batchingText, MEANING, tensorText, workerName, type Tensor, type Version } from "../documents";
import { useLoaded } from "../loaded";
import { link, place, setQuery } from "../router";
import { Table } from "../table";
import { Ago, Badge, Button, Card, Empty, Facts, State } from "../ui";
import { bytes, count, seconds, when } from "../units";
import { activation, type TabProps } from "./model";
import { TrafficCharts } from "./overview";

export function SummaryTab({ model }: TabProps) {
  const shown = model.versions.find((one) => one.version === model.serving) ?? model.versions.at(-1);
  return (
    <>
      {model.reason && <div class="problem critical"><strong>Its last load failed</strong><p>{model.reason}</p></div>}
      {shown ? <Details version={shown} /> : <Empty>It has no version.</Empty>}
      <div class="cards">
        <TrafficCharts model={model.name} />
        <Errors versions={model.versions} model={model.name} />
      </div>
    </>
  );
}

export function VersionsTab({ model, ask }: TabProps) {
  const asked = place.value.query.get("version");
  const chosen = model.versions.find((one) => String(one.version) === asked);
  const write = session.value?.can.write;
  const removal = (one: Version, number: number) => {
    const serves = number === model.serving;
    ask({
      title: `Delete version ${number} of ${model.name}?`,
      action: "Delete for good",
      danger: true,
      means: (
        <>
          <p>Its files and what was compiled from them are deleted. This cannot be undone, and its number is not used again.</p>
          {serves && <p><b>It answers now.</b> {model.versions.length > 1 ? "Another version answers in its place." : "It is the only one: the model is deleted with it."}</p>}
        </>
      ),
      run: () => send("DELETE", `${admin("models", model.name, "versions", String(one.version))}${serves ? "?force=true" : ""}`),
    });
  };
  return (
    <>
      <Card>
        <Table label={`versions of ${model.name}`} rows={[...model.versions].reverse()} keyOf={(one) => String(one.version)} columns={[
          { name: "Version", cell: (one) => (one.version === null ? "new" : <a href={link(["models", model.name], { tab: "versions", version: String(one.version) })}>{one.version}</a>), by: (one) => one.version },
          {
            name: "State",
            cell: (one) => (
              <>
                <State of={one.state} /> {one.version !== null && one.version === model.serving && <Badge kind="good">answers</Badge>}
                {one.reason && <div class="hint">{one.reason}</div>}
              </>
            ),
          },
          { name: "Uploaded", cell: (one) => <Ago at={one.created} />, by: (one) => one.created },
          { name: "Size", cell: (one) => bytes(one.size_bytes), by: (one) => one.size_bytes, right: true },
          { name: "Made from", cell: (one) => one.imported?.importer ?? "as uploaded" },
          { name: "Takes", cell: (one) => one.usage?.sentence ?? "–" },
          {
            name: "Change",
            cell: ({ version, ...one }) => version !== null && write && one.digest && (
              <div class="filters">
                {version !== model.active && <Button aria-label={`Activate version ${version}`} onClick={() => ask(activation(model, version))}>Activate</Button>}
                <Button kind="danger" aria-label={`Delete version ${version}`} onClick={() => removal({ version, ...one }, version)}>Delete</Button>
              </div>
            ),
          },
        ]} />
      </Card>
      {chosen ? (
        <>
          <div class="head below"><h2>Version {chosen.version}</h2><Button onClick={() => setQuery({ tab: "versions" })}>Close</Button></div>
          <Details version={chosen} />
          <div class="cards"><Errors versions={[chosen]} model={model.name} /></div>
        </>
      ) : (
        <p class="hint">Choose a version to see its signature and how it batches.</p>
      )}
    </>
  );
}

function Tensors(props: { specs: Tensor[] }) {
  return <ul class="plain">{props.specs.map((spec) => <li key={spec.name}>{tensorText(spec)}</li>)}</ul>;
}

function Details(props: { version: Version }) {
  const { version } = props;
  if (!version.digest) return <Card title="Being uploaded"><p>{MEANING[version.state]}</p></Card>;
  const { imported } = version;
  const made = imported && `${imported.importer} (${imported.producer}); the answers for ${imported.rows} rows were compared, output ${imported.output} differs most, by ${imported.difference.toPrecision(2)}`;
  return (
    <div class="cards">
      <Card title={`Signature of version ${version.version}`}>
        <Facts of={[
          ["Takes", version.usage?.kind !== "tensors" && version.usage?.sentence],
          ["Inputs", <Tensors specs={version.inputs} />],
          ["Answers", <Tensors specs={version.outputs} />],
        ]} />
        <Profile version={version} />
      </Card>
      <Card title="How it runs">
        <Facts of={[
          ["State", `${MEANING[version.state] ?? version.state} ${version.reason ?? ""}`],
          ["Batching", batchingText(version)],
          ["Pools", version.pools.join(", ")],
          ["Files", `${bytes(version.size_bytes)}, uploaded ${when(version.created)}`],
          ["sha256", <code>{version.digest}</code>],
          ["Made from", made],
          ...version.notes.map((note): [string, string] => ["Note", note]),
        ]} />
      </Card>
    </div>
  );
}

/** Measured run times by batch size, of the first worker that has some. */
function Profile(props: { version: Version }) {
  const measured = props.version.instances.find((one) => Object.keys(one.profile).length);
  if (!measured) return null;
  const rows = Object.entries(measured.profile).map(([size, taken]) => ({ size: Number(size), taken }));
  return (
    <>
      <h3>A run takes, on {workerName(measured.worker)}</h3>
      <Table label="time of a run by rows" rows={rows} keyOf={(row) => String(row.size)} columns={[
        { name: "Rows", cell: (row) => row.size, right: true },
        { name: "Run", cell: (row) => seconds(row.taken), right: true },
        { name: "Each row", cell: (row) => seconds(row.taken / row.size), right: true },
      ]} />
    </>
  );
}

interface Trouble {
  at: number | null;
  what: string;
  why: string;
}

interface FailedCall {
  at: number;
  status: number;
  path: string;
  model: string | null;
  request_id: string;
}

function Errors(props: { versions: Version[]; model: string }) {
  const calls = useLoaded(
    async (abort) => (session.value?.can.metrics ? (await get<{ failed: FailedCall[] }>("requests", abort)).failed : []),
    [props.model],
    10,
  );
  const troubles: Trouble[] = props.versions.flatMap((one) => [
    ...(one.state === "failed" && one.reason ? [{ at: null, what: `Version ${one.version} failed`, why: one.reason }] : []),
    ...one.load_failures.map((at) => ({ at: at.failed_at, what: `Load of version ${one.version} on ${at.kind}`, why: `${at.reason}. Activate or load it to try again.` })),
    ...one.errors.map((at) => ({ at: at.at, what: `A run of version ${one.version} in ${workerName(at.worker)}${at.count > 1 ? `, ${count(at.count)} times` : ""}`, why: at.text })),
    ...one.instances.filter((at) => at.state === "failed").map((at) => ({ at: null, what: `Version ${one.version} in ${at.worker}`, why: at.reason ?? "no reason is known" })),
  ]);
  for (const call of (calls.value ?? []).filter((one) => one.model === props.model).slice(0, 10)) {
    troubles.push({ at: call.at, what: `A call was answered ${call.status}`, why: `${call.path}, request ${call.request_id}` });
  }
  return (
    <Card title="Last errors" wide aside={session.value?.can.metrics && <a href={link(["requests"], { show: "failed", model: props.model })}>Failed requests</a>}>
      <Table label="last errors" rows={troubles} keyOf={(row) => `${row.at} ${row.what} ${row.why}`} empty="None is known." columns={[
        { name: "When", cell: (row) => (row.at === null ? "now" : <Ago at={row.at} />) },
        { name: "What", cell: (row) => row.what },
        { name: "Why", long: true, cell: (row) => row.why },
      ]} />
    </Card>
  );
}
