// The question before a race: what it means, with which samples, and within which bounds.
import { useRef, useState } from "preact/hooks";
import { admin, send, upload } from "../api";
import type { Version } from "../documents";
import { Check, Drop, Field } from "../fields";
import { useDraft } from "../loaded";
import { Confirm } from "../ui";
import { bytes } from "../units";

interface Options {
  pool: string;
  targets: string;
  random: boolean;
  cosine: string;
  agreement: string;
}
const FIRST: Options = { pool: "", targets: "", random: false, cosine: "0.999", agreement: "0.99" };

function bodyOf(options: Options) {
  return {
    pool: options.pool || null,
    targets: options.targets.split(/[\s,]+/).filter(Boolean),
    accept_random_samples: options.random,
    gate: { cosine_min: Number(options.cosine), agreement_min: Number(options.agreement) },
  };
}

export function RaceQuestion(props: { version: Version; onDone: () => void; onStarted: () => void }) {
  const { version } = props;
  const [options, set] = useDraft(`race ${version.model}`, FIRST);
  const [samples, setSamples] = useState<File | null>(null);
  const [sent, setSent] = useState<number | null>(null);
  const abort = useRef(new AbortController());
  const path = admin("models", version.model, "versions", String(version.version), "race");
  const run = async () => {
    try {
      if (samples) await upload("PUT", `${path}/samples`, samples, (now) => setSent(now.sent), abort.current.signal);
    } finally {
      setSent(null);
    }
    await send("POST", path, bodyOf(options));
    props.onStarted();
  };
  const done = () => {
    abort.current.abort();
    props.onDone();
  };
  return (
    <Confirm title={`Start a race of version ${version.version}?`} action="Start the race" onDone={done} run={run}>
      <p>
        A worker compiles the version in every way that is installed, compares the answers with those of its own file, and measures
        at low priority while it serves. What is faster and as accurate serves from then on; that can be undone.
      </p>
      <Drop label="Samples" accept=".npz" onFile={setSamples}>
        {samples ? <><b>{samples.name}</b>, {bytes(samples.size)}</> : "Real inputs, so that forms with fewer digits are judged by what callers send: drop an .npz file, or choose one."}
      </Drop>
      <p class="hint">Arrays {version.inputs.map((spec) => `input/${spec.name}`).join(", ")}, rows first. They replace samples of before, and serve later races, too.</p>
      {sent !== null && samples && <progress aria-label="progress of the samples" value={sent} max={samples.size || 1} />}
      <Check title="Let forms with fewer digits race without samples, judged by random inputs" checked={options.random} onCheck={(random) => set({ random })} />
      <details open={!!options.targets || !!options.pool}>
        <summary>Bounds, and who takes part</summary>
        <div class="fields">
          <Field title="Least cosine of each output" type="number" required min={-1} max={1} step="any" value={options.cosine} onText={(cosine) => set({ cosine })} />
          <Field title="Least share of rows of the same class" type="number" required min={0} max={1} step="any" value={options.agreement} onText={(agreement) => set({ agreement })} />
        </div>
        {version.pools.length > 1 && (
          <Field title="Pool" value={options.pool} options={[["", "the first that has it"], ...version.pools.map((name): [string, string] => [name, name])]} onText={(pool) => set({ pool })} />
        )}
        <Field title="Compilers or forms" hint="Names of the table, with commas between; empty: all that are installed." value={options.targets} onText={(targets) => set({ targets })} />
      </details>
    </Confirm>
  );
}
