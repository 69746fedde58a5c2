// Upload of a model: progress, the stages of its check, and the verdict in words.
import { useEffect, useState } from "preact/hooks";
import { admin, ApiError, get, session } from "../api";
import { batchingText, MEANING, stateWords, type Model, type Version } from "../documents";
import { Check, Drop, Field } from "../fields";
import { useDraft } from "../loaded";
import { link, place } from "../router";
import { Badge, Button, Card, ErrorLine, Facts, Head, State, textOf } from "../ui";
import { bytes, percent, seconds } from "../units";
import { cancel, change, choose, chosen, isBusy, run, start, type Fields, type Run, type Stage } from "../upload_run";

const FIRST: Fields = { name: "", version: "", activate: true, pickle: false, code: false, inputs: "", config: "" };
const PICKLE = "It is a pickle, which can execute code: load classes of a list alone, in the sandbox";
const CODE = "Its folder brings code: run it, in the sandbox";

/** NAME of NAME.onnx, as a name of a model. */
function nameOf(file: File): string {
  return file.name.replace(/(\.tar)?\.[A-Za-z0-9]+$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 64);
}

/** What to do after an error, by its status; the server's words say what is wrong. */
function advice(error: unknown): string {
  const status = error instanceof ApiError ? error.status : -1;
  if (status === 400 && /allow.pickle/.test(textOf(error))) return `If you trust the file, tick “${PICKLE}” below the options, and send it again.`;
  if (status === 400 && /allow.code/.test(textOf(error))) return `If you trust the folder, tick “${CODE}” below the options, and send it again.`;
  const words: Record<number, string> = {
    0: "An upload cannot be continued: the server has kept nothing of it. The file and the fields are still here, so send it again when the server answers.",
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
  const [fields, set, , kept] = useDraft<Fields>(asked ? `upload ${asked}` : "upload", { ...FIRST, name: asked });
  const [file, now, busy] = [chosen.value, run.value, isBusy()];
  const take = (taken: File) => {
    choose(taken);
    if (!fields.name) set({ name: nameOf(taken) });
  };
  const submit = (event: Event) => {
    event.preventDefault();
    void start(fields);
  };
  return (
    <>
      <Head title="Upload a model" />
      <div class="cards">
        <Card title="The model">
          <form onSubmit={submit}>
            {busy ? (
              <p><b>{file?.name}</b>, {bytes(file?.size)}</p>
            ) : (
              <Drop label="Model file" onFile={take}>
                {file ? <><b>{file.name}</b>, {bytes(file.size)}</> : "Drop a model here, or choose its file: ONNX, a framework's that is imported, Python, a graph, or a zip or tar of a folder."}
              </Drop>
            )}
            {!file && kept && fields.name && <p class="hint">A reload forgets the file: choose it again.</p>}
            <CodeHint name={file?.name ?? ""} />
            <FieldInputs fields={fields} set={set} />
            <div class="actions">
              <Button type="submit" kind="main" disabled={!file || busy || !fields.name.trim()}>{now?.stage === "failed" || now?.stage === "cancelled" ? "Send again" : "Upload"}</Button>
              {busy && <Button kind="danger" onClick={cancel}>Cancel</Button>}
            </div>
          </form>
        </Card>
        {now && <Happening now={now} />}
      </div>
    </>
  );
}

/** What is needed for code, which workers run: said before a file is sent in vain. */
function CodeHint(props: { name: string }) {
  const why = session.value?.no_code;
  if (why && props.name.endsWith(".py")) return <p class="note" role="status">This file would be refused: {why}.</p>;
  return <p class="hint">Code (a .py file, or a folder with service.py) is run by workers, so it needs the scope <code>models:code</code>: {why ? `${why}.` : "you may upload it."}</p>;
}

function FieldInputs({ fields, set }: { fields: Fields; set: (change: Partial<Fields>) => void }) {
  const text = (name: "name" | "version" | "inputs" | "config") => ({ value: fields[name], onText: (value: string) => set({ [name]: value }) });
  return (
    <>
      <Field title="Name" required autocomplete="off" {...text("name")} />
      <Field title="Version" hint="A whole number; empty: the next one." inputMode="numeric" pattern="\s*[0-9]*\s*" {...text("version")} />
      <Check title="Make it the version that answers, when it is ready" checked={fields.activate} onCheck={(activate) => set({ activate })} />
      <details open={fields.pickle || fields.code || !!fields.inputs || !!fields.config}>
        <summary>Options of imports, and configuration</summary>
        <Check title={PICKLE} checked={fields.pickle} onCheck={(pickle) => set({ pickle })} />
        <Check title={CODE} checked={fields.code} onCheck={(code) => set({ code })} />
        <Field title="Inputs that the file does not describe" lines={2} {...text("inputs")}
          hint="As TorchScript needs them, one a line: name:datatype:shape, with -1 for a size that varies, like x:FP32:-1,3,224,224" />
        <Field title="Configuration as JSON" lines={3} hint={'Like {"rows_max": 32, "pools": ["cpu"]}; empty: the check decides.'} {...text("config")} />
      </details>
    </>
  );
}

function Happening({ now }: { now: Run }) {
  const { stage, version, error } = now;
  return (
    <Card title={`Upload of ${now.model}`}>
      {stage === "sending" && (
        <>
          <progress aria-label="progress of the upload" value={now.sent} max={now.total || 1} />
          <p class="hint">{bytes(now.sent)} of {bytes(now.total)}, {percent(now.sent / (now.total || 1))}</p>
        </>
      )}
      {stage === "cancelled" ? <p role="status">It was cancelled. The server has kept nothing of it; the file and the fields are still here.</p> : <Stages now={now} />}
      {stage === "failed" && (
        <>
          <ErrorLine error={error ?? version?.reason} />
          <p><b>What to do:</b> {error ? advice(error) : "The file was taken, and workers cannot load it. The reason says why; mend it and upload it again, or load the model to try once more."}</p>
        </>
      )}
      {version && (stage === "done" || stage === "loading") && <Verdict version={version} />}
    </Card>
  );
}

const ORDER: [Stage, string][] = [
  ["sending", "The file is sent"],
  ["checking", "The server checks it: it reads, converts and runs it in a sandbox"],
  ["loading", "A worker loads it"],
  ["done", "It can be called"],
];

/** The steps, and where it is. While the server works, the state of the upload is asked for. */
function Stages({ now: { stage, model, version, began, sent, total } }: { now: Run }) {
  const [state, setState] = useState("");
  const [clock, setClock] = useState(Date.now());
  const [lost, setLost] = useState<unknown>(null);
  const watched = stage === "checking" || stage === "loading";
  const number = version?.version ?? null;
  useEffect(() => {
    if (!watched) return;
    const abort = new AbortController();
    const look = async () => {
      setClock(Date.now());
      try {
        const found = await get<Model>(admin("models", model), abort.signal);
        const one = number === null ? found.versions.find((each) => !each.digest) : found.versions.find((each) => each.version === number);
        setLost(null);
        if (!one) return;
        setState(one.state);
        if (number !== null && ["ready", "standby", "failed", "unloaded"].includes(one.state)) change({ version: one, stage: one.state === "failed" ? "failed" : "done" });
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
  const at = failed ? (version ? 2 : sent >= total ? 1 : 0) : ORDER.findIndex(([name]) => name === stage);
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
      {watched && <p class="hint">{seconds(Math.round((clock - began) / 1000))} so far. Large models may take minutes.</p>}
      {lost !== null && watched && <p class="note" role="status">{textOf(lost)}; the page asks again.</p>}
    </>
  );
}

function Verdict({ version }: { version: Version & { existing?: boolean } }) {
  return (
    <>
      <p>
        <State of={version.state} /> <b>{version.model}</b> version {version.version}: {MEANING[version.state]}
        {version.existing && " It was there already, with the same bytes and configuration: no new version was made."}
      </p>
      <Facts of={[
        ["Takes", version.usage?.sentence],
        ["Batching", batchingText(version)],
        ["Made from", version.imported && `${version.imported.importer}; ${version.imported.rows} rows give the same answers`],
        ["Reason", version.reason],
        ...version.notes.map((note): [string, string] => ["Note", note]),
      ]} />
      <div class="actions">
        {session.value?.can.infer && <a class="button main" href={link(["models", version.model], { tab: "try" })}>Try it</a>}
        <a class="button" href={link(["models", version.model])}>See the model</a>
      </div>
    </>
  );
}
