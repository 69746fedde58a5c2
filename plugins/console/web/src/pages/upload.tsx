// Upload of a model: progress, the stages of its check, and the verdict in words.
import { useEffect, useRef, useState } from "preact/hooks";
import { admin, ApiError, get, session, upload, type Progress } from "../api";
import { batchingText, MEANING, stateWords, type Model, type Version } from "../documents";
import { link, place } from "../router";
import { Badge, Button, Card, Drop, ErrorLine, textOf, useKept } from "../ui";
import { bytes, percent, seconds } from "../units";

interface Fields {
  name: string;
  version: string;
  activate: boolean;
  pickle: boolean;
  code: boolean;
  inputs: string;
  config: string;
}
const FIRST: Fields = { name: "", version: "", activate: true, pickle: false, code: false, inputs: "", config: "" };

/** NAME of NAME.onnx, as a name of a model. */
function nameOf(file: File): string {
  return file.name.replace(/(\.tar)?\.[A-Za-z0-9]+$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 64);
}

function pathOf(fields: Fields): [method: string, path: string] {
  const query = new URLSearchParams();
  if (!fields.activate) query.set("activate", "false");
  if (fields.pickle) query.set("allow_pickle", "true");
  if (fields.code) query.set("allow_code", "true");
  for (const line of fields.inputs.split("\n")) if (line.trim()) query.append("input", line.trim());
  if (fields.config.trim()) query.set("config", fields.config);
  const version = fields.version.trim();
  const path = version ? admin("models", fields.name.trim(), "versions", version) : admin("models", fields.name.trim(), "versions");
  const asked = query.toString();
  return [version ? "PUT" : "POST", asked ? `${path}?${asked}` : path];
}

type Stage = "sending" | "checking" | "loading" | "done" | "failed";

/** What to do after an error, by its status; the server's words say what is wrong. */
function advice(error: unknown): string {
  const status = error instanceof ApiError ? error.status : -1;
  const words: Record<number, string> = {
    0: "The server has kept nothing of it. Send it again: the file and the fields are still here.",
    400: "Mend what it says in the file or in the options, and send it again. Nothing of this upload serves.",
    403: "Ask an admin for a key with the scope that it names, or leave the option out.",
    409: "Versions do not change: leave the number empty to get the next one, or choose another.",
    413: "Raise the limit that it names, or send a smaller file.",
    415: "Send the file as it is, or in a zip or tar.",
    429: "Wait a little, and send it again.",
    503: "Wait a little, and send it again.",
    507: "Make room on the disk of the server, or delete versions that nobody needs.",
  };
  return words[status] ?? "Send it again; if that does not help, the page Logs may say more.";
}

export function UploadPage() {
  const asked = place.value.query.get("name") ?? "";
  const [kept, keep] = useKept(asked ? `upload ${asked}` : "upload");
  const fields: Fields = { ...FIRST, name: asked, ...(kept ? (JSON.parse(kept) as Partial<Fields>) : {}) };
  const set = (change: Partial<Fields>) => keep(JSON.stringify({ ...fields, ...change }));
  const [file, setFile] = useState<File | null>(null);
  const [stage, setStage] = useState<Stage | null>(null);
  const [progress, setProgress] = useState<Progress>({ sent: 0, total: 0 });
  const [version, setVersion] = useState<Version | null>(null);
  const [error, setError] = useState<unknown>(null);
  const running = useRef<AbortController | null>(null);
  const busy = stage === "sending" || stage === "checking";
  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => {
    if (!busy) return;
    // The browser asks before a reload, which would end the upload.
    const warn = (event: BeforeUnloadEvent) => event.preventDefault();
    addEventListener("beforeunload", warn);
    return () => removeEventListener("beforeunload", warn);
  }, [busy]);
  const choose = (chosen: File) => {
    setFile(chosen);
    setStage(null);
    setError(null);
    if (!fields.name) set({ name: nameOf(chosen) });
  };
  const start = async (event: Event) => {
    event.preventDefault();
    if (!file) return;
    const abort = new AbortController();
    running.current = abort;
    setError(null);
    setVersion(null);
    setProgress({ sent: 0, total: file.size });
    setStage("sending");
    const [method, path] = pathOf(fields);
    try {
      const text = await upload(method, path, file, (now) => {
        setProgress(now);
        if (now.sent >= now.total) setStage("checking");
      }, abort.signal);
      setVersion(JSON.parse(text) as Version);
      setStage("loading");
    } catch (failure) {
      setError(failure);
      setStage("failed");
    }
  };
  return (
    <>
      <div class="head"><h1>Upload a model</h1></div>
      <div class="cards">
        <Card title="The model">
          <form onSubmit={(event) => void start(event)}>
            <Drop label="Model file" onFile={choose}>
              {file ? <><b>{file.name}</b>, {bytes(file.size)}</> : "Drop a model here, or choose its file: ONNX, a framework's that is imported, or a zip or tar of a folder."}
            </Drop>
            {!file && kept && fields.name && <p class="hint">A reload forgets the file: choose it again.</p>}
            <FieldInputs fields={fields} set={set} />
            <div class="actions">
              <Button type="submit" kind="main" disabled={!file || busy || !fields.name.trim()}>{stage === "failed" ? "Send again" : "Upload"}</Button>
              {busy && <Button kind="danger" onClick={() => running.current?.abort()}>Cancel</Button>}
            </div>
          </form>
        </Card>
        {stage && (
          <Card title="What happens">
            {stage === "sending" && (
              <>
                <progress aria-label="progress of the upload" value={progress.sent} max={progress.total || 1} />
                <p class="hint">{bytes(progress.sent)} of {bytes(progress.total)}, {percent(progress.sent / (progress.total || 1))}</p>
              </>
            )}
            <Stages stage={stage} sent={progress.sent >= progress.total} model={fields.name.trim()} version={version} settled={(now) => (setVersion(now), setStage(now.state === "failed" ? "failed" : "done"))} />
            {stage === "failed" && (
              <>
                <ErrorLine error={error ?? version?.reason} />
                <p><b>What to do:</b> {error ? advice(error) : "The file was taken, and workers cannot load it. The reason says why; mend it and upload it again, or load the model to try once more."}</p>
              </>
            )}
            {version && (stage === "done" || stage === "loading") && <Verdict version={version} />}
          </Card>
        )}
      </div>
    </>
  );
}

function FieldInputs({ fields, set }: { fields: Fields; set: (change: Partial<Fields>) => void }) {
  const check = (name: "activate" | "pickle" | "code", title: string) => (
    <label class="line">
      <input type="checkbox" checked={fields[name]} onChange={(event) => set({ [name]: event.currentTarget.checked })} />
      {title}
    </label>
  );
  return (
    <>
      <label for="name">Name</label>
      <input id="name" required autocomplete="off" spellcheck={false} value={fields.name} onInput={(event) => set({ name: event.currentTarget.value })} />
      <label for="version">Version</label>
      <input id="version" inputMode="numeric" pattern="\s*[0-9]*\s*" value={fields.version} aria-describedby="version-hint" onInput={(event) => set({ version: event.currentTarget.value })} />
      <p class="hint" id="version-hint">A whole number; empty: the next one.</p>
      {check("activate", "Make it the version that answers, when it is ready")}
      <details open={fields.pickle || fields.code || !!fields.inputs || !!fields.config}>
        <summary>Options of imports, and configuration</summary>
        {check("pickle", "It is a pickle, which can execute code: load classes of a list alone, in the sandbox")}
        {check("code", "Its folder brings code: run it, in the sandbox")}
        <label for="inputs">Inputs that the file does not describe</label>
        <textarea id="inputs" spellcheck={false} value={fields.inputs} aria-describedby="inputs-hint" onInput={(event) => set({ inputs: event.currentTarget.value })} />
        <p class="hint" id="inputs-hint">As TorchScript needs them, one a line: name:datatype:shape, with -1 for a size that varies, like x:FP32:-1,3,224,224</p>
        <label for="config">Configuration as JSON</label>
        <textarea id="config" spellcheck={false} value={fields.config} aria-describedby="config-hint" onInput={(event) => set({ config: event.currentTarget.value })} />
        <p class="hint" id="config-hint">{'Like {"rows_max": 32, "pools": ["cpu"]}; empty: the check decides.'}</p>
      </details>
    </>
  );
}

const ORDER: [Stage, string][] = [
  ["sending", "The file is sent"],
  ["checking", "The server checks it: it reads, converts and runs it in a sandbox"],
  ["loading", "A worker loads it"],
  ["done", "It can be called"],
];

/** The steps, and where it is. While the server works, the state of the upload is asked for. */
function Stages(props: { stage: Stage; sent: boolean; model: string; version: Version | null; settled: (version: Version) => void }) {
  const { stage, model, version } = props;
  const [state, setState] = useState("");
  const [began] = useState(Date.now());
  const [now, setNow] = useState(Date.now());
  const [lost, setLost] = useState<unknown>(null);
  const watched = stage === "checking" || stage === "loading";
  const number = version?.version ?? null;
  useEffect(() => {
    if (!watched) return;
    const abort = new AbortController();
    const look = async () => {
      setNow(Date.now());
      try {
        const found = await get<Model>(admin("models", model), abort.signal);
        const one = number === null ? found.versions.find((each) => !each.digest) : found.versions.find((each) => each.version === number);
        setLost(null);
        if (!one) return;
        setState(one.state);
        if (number !== null && ["ready", "standby", "failed", "unloaded"].includes(one.state)) props.settled(one);
      } catch (failure) {
        // While its first version is checked there may be no such model yet.
        if (!abort.signal.aborted && !(failure instanceof ApiError && failure.status === 404)) setLost(failure);
      }
    };
    void look();
    const timer = setInterval(() => void look(), 1000);
    return () => {
      abort.abort();
      clearInterval(timer);
    };
  }, [watched, model, number]);
  const failed = stage === "failed";
  const at = failed ? (version ? 2 : props.sent ? 1 : 0) : ORDER.findIndex(([name]) => name === stage);
  return (
    <>
      <ol class="steps" aria-live="polite">
        {ORDER.map(([name, words], step) => {
          const done = step < at || stage === "done";
          const here = step === at && stage !== "done";
          return (
            <li key={name} aria-current={here ? "step" : undefined}>
              <Badge kind={done ? "good" : here ? (failed ? "bad" : "warn") : "plain"}>{done ? "done" : here ? (failed ? "ended here" : "now") : "later"}</Badge> {words}
              {here && watched && state && <span class="hint"> {stateWords(state)[1]}: {MEANING[state]}</span>}
            </li>
          );
        })}
      </ol>
      {watched && <p class="hint">{seconds(Math.round((now - began) / 1000))} so far. Large models may take minutes.</p>}
      {lost !== null && watched && <p class="note" role="status">{textOf(lost)}; the page asks again.</p>}
    </>
  );
}

function Verdict({ version }: { version: Version & { existing?: boolean } }) {
  const [kind, words] = stateWords(version.state);
  return (
    <>
      <p>
        <Badge kind={kind}>{words}</Badge> <b>{version.model}</b> version {version.version}: {MEANING[version.state]}
        {version.existing && " It was there already, with the same bytes and configuration: no new version was made."}
      </p>
      <dl class="pairs">
        {version.usage && <><dt>Takes</dt><dd>{version.usage.sentence}</dd></>}
        <dt>Batching</dt><dd>{batchingText(version)}</dd>
        {version.imported && <><dt>Made from</dt><dd>{version.imported.importer}; {version.imported.rows} rows give the same answers</dd></>}
        {version.reason && <><dt>Reason</dt><dd>{version.reason}</dd></>}
        {version.notes.map((note) => <><dt>Note</dt><dd>{note}</dd></>)}
      </dl>
      <div class="actions">
        {session.value?.can.infer && <a class="button main" href={link(["models", version.model], { tab: "try" })}>Try it</a>}
        <a class="button" href={link(["models", version.model])}>See the model</a>
      </div>
    </>
  );
}
