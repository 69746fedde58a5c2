// The compiled forms of a version, and the race that decides which of them serves: a table and a plot.
import { useState } from "preact/hooks";
import { admin, ApiError, get, send, session } from "../api";
import type { RaceSummary, Variant, Version } from "../documents";
import { Field } from "../fields";
import { useLoaded } from "../loaded";
import { place, setQuery } from "../router";
import { Table } from "../table";
import { Badge, Button, Card, Empty, ErrorLine, Figure, Pending } from "../ui";
import { bytes, seconds, when } from "../units";
import type { TabProps } from "./model";
import { RaceQuestion } from "./race_question";

interface Candidate {
  target: string;
  candidate: string;
  lossy?: boolean;
  verdict: string;
  why?: string;
  compile_s?: number;
  cached?: boolean;
  size_bytes?: number;
  ratio?: number | null;
  ratios?: Record<string, number>;
  cosine_min?: number | null;
  agreement_min?: number | null;
}
interface Race {
  pool: string;
  kind: string;
  state: "queued" | "running" | "decided" | "failed" | "cancelled";
  why: string;
  requested_at: number;
  ended_at: number | null;
  worker: string | null;
  progress: { stage?: string; candidate?: string; done?: number; total?: number; seconds?: number };
  baseline: string | null;
  winner: string | null;
  ratio: number;
  table: Record<string, string>;
  rows: Candidate[];
  report: { why?: string; notes?: string[]; seconds?: number; samples?: string; baseline_s?: Record<string, number> } | null;
  serving: boolean;
  undone: { why: string; at: number; automatic: boolean } | null;
  past: { state: string; ended_at: number; winner: string | null; ratio: number; why: string }[];
}

const STATE_WORDS: Record<Race["state"], string> = {
  queued: "It waits for a worker",
  running: "It runs at low priority while the model serves",
  decided: "It is decided",
  failed: "It failed",
  cancelled: "It was cancelled",
};
const VERDICTS: Record<string, ["good" | "bad" | "warn" | "plain", string]> = {
  won: ["good", "won"],
  lost: ["plain", "not faster"],
  inaccurate: ["warn", "answers differ too much"],
  failed: ["bad", "failed"],
  skipped: ["plain", "skipped"],
};

function times(ratio: number | null | undefined): string {
  return ratio == null ? "–" : `${ratio.toFixed(2)}×`;
}

export function RaceTab({ model, ask, reload }: TabProps) {
  const known = model.versions.filter((one) => one.version !== null && one.digest);
  const asked = place.value.query.get("version");
  const version = known.find((one) => String(one.version) === asked) ?? known.find((one) => one.version === model.serving) ?? known.at(-1);
  if (!version) return <Empty>It has no version that can be compiled.</Empty>;
  return (
    <>
      {known.length > 1 && (
        <div class="filters">
          <Field title="Version" value={String(version.version)} options={known.map((one) => [String(one.version), String(one.version)])}
            onText={(chosen) => setQuery({ tab: "race", version: chosen })} />
        </div>
      )}
      <RaceOf key={version.version} version={version} ask={ask} reload={reload} />
      <Forms variants={version.variants} races={version.races} />
    </>
  );
}

function RaceOf({ version, ask, reload }: { version: Version } & Pick<TabProps, "ask" | "reload">) {
  const path = admin("models", version.model, "versions", String(version.version), "race");
  const raced = version.races.length > 0;
  const loaded = useLoaded<{ race: Race | null }>(
    async (abort) => {
      if (!raced) return { race: null };
      try {
        return { race: await get<Race>(path, abort) };
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return { race: null };
        throw error;
      }
    },
    [path, raced],
    2,
  );
  const [asking, setAsking] = useState(false);
  if (!loaded.value) return <Pending of={loaded} />;
  const { race } = loaded.value;
  const runs = race?.state === "queued" || race?.state === "running";
  const again = () => {
    loaded.reload();
    reload();
  };
  const buttons = session.value?.can.write && (
    <div class="filters">
      {!runs && <Button kind="main" onClick={() => setAsking(true)}>{race ? "Race again" : "Start a race"}</Button>}
      {runs && <Button kind="danger" onClick={() => ask({
        title: "Cancel the race?", action: "Cancel the race", danger: true,
        means: <p>A worker ends it within a second. What serves now goes on serving.</p>,
        run: () => send("DELETE", `${path}?pool=${encodeURIComponent(race.pool)}`).then(again),
      })}>Cancel the race</Button>}
      {race?.serving && <Button onClick={() => ask({
        title: "Serve the version's own file again?", action: "Undo the verdict",
        means: <p>Workers swap back without losing a call. It will be {times(race.ratio)} slower again; the report stays.</p>,
        run: () => send("POST", `${path}/undo?pool=${encodeURIComponent(race.pool)}`).then(again),
      })}>Undo the verdict</Button>}
    </div>
  );
  return (
    <Card title={`The race of version ${version.version}`} aside={buttons} wide>
      <ErrorLine error={loaded.error} again={loaded.reload} />
      {race ? <Report race={race} /> : <Empty>No race was asked for: its own file serves.</Empty>}
      {asking && <RaceQuestion version={version} onDone={() => setAsking(false)} onStarted={again} />}
    </Card>
  );
}

function Report({ race }: { race: Race }) {
  const { progress } = race;
  const words = STATE_WORDS[race.state];
  const why = (race.why || race.report?.why || "").replace(/\.$/, "");
  const measured = race.rows.filter((row) => row.ratio != null);
  const missing = race.rows.filter((row) => row.verdict === "unavailable");
  return (
    <>
      <p role="status">
        <b>{words}</b>{why && why !== words.toLowerCase() ? `: ${why}.` : "."}
        {race.undone && ` The verdict was taken back ${when(race.undone.at)}: ${race.undone.why}.`}
      </p>
      {race.state === "running" && (
        <>
          <p class="hint">{[progress.stage, progress.candidate].filter(Boolean).join(": ")}{progress.total ? `, ${progress.done ?? 0} of ${progress.total} forms` : ""}</p>
          <progress aria-label="progress of the race" value={progress.total ? (progress.done ?? 0) : undefined} max={progress.total || 1} />
        </>
      )}
      {race.state === "decided" && (
        <dl class="figures">
          <Figure name="Winner" value={race.winner ?? "its own file"} note={race.serving ? "serves now" : race.winner ? "does not serve" : "nothing was faster"} />
          <Figure name="As fast" value={times(race.ratio)} note={`as ${race.baseline ?? "its own file"}`} />
          <Figure name="Took" value={seconds(race.report?.seconds)} note={`on ${race.kind}, pool ${race.pool}`} />
          <Figure name="Samples" value={race.report?.samples || "–"} note={`ended ${when(race.ended_at)}`} />
        </dl>
      )}
      {race.report?.notes?.map((note) => <p class="note" key={note}>{note}</p>)}
      {measured.length > 0 && <Plot rows={measured} />}
      {race.rows.length > 0 && <Candidates rows={race.rows.filter((row) => row.verdict !== "unavailable")} />}
      {missing.length > 0 && (
        <details>
          <summary>{missing.length} more that this worker cannot compile</summary>
          <ul>{missing.map((row) => <li key={row.candidate}><b>{row.candidate}</b>: {row.why}</li>)}</ul>
        </details>
      )}
      {race.past.length > 0 && (
        <>
          <h3>Races before</h3>
          <ul>{race.past.map((one) => <li key={one.ended_at}>{`${when(one.ended_at)}: ${one.state}${one.winner ? `, ${one.winner} was ${times(one.ratio)} as fast` : ""}. ${one.why}`}</li>)}</ul>
        </>
      )}
    </>
  );
}

const LINE = 26;

/** Bars of how many times as fast each form is; the line is the version's own file. */
function Plot(props: { rows: Candidate[] }) {
  const rows = [...props.rows].sort((a, b) => (b.ratio ?? 0) - (a.ratio ?? 0)).slice(0, 20);
  const most = Math.max(1.2, ...rows.map((row) => row.ratio ?? 0));
  const share = (ratio: number) => `${(100 * ratio) / most}%`;
  return (
    <figure class="race">
      <svg width="100%" height={rows.length * LINE + 4} role="img" aria-label={`times as fast as its own file: ${rows.map((row) => `${row.candidate} ${times(row.ratio)}`).join(", ")}`}>
        {rows.map((row, at) => (
          <g key={row.candidate}>
            <rect class={row.verdict} x="0" y={at * LINE + 3} width={share(row.ratio ?? 0)} height={LINE - 8} rx="3" />
            <text x="6" y={at * LINE + LINE / 2 + 4}>{`${row.candidate}  ${times(row.ratio)}  ${VERDICTS[row.verdict]?.[1] ?? row.verdict}`}</text>
          </g>
        ))}
        <line x1={share(1)} x2={share(1)} y1="0" y2={rows.length * LINE + 4} />
      </svg>
      <figcaption class="hint">Times as fast as the version's own file, which is the line; weighted by batch size.</figcaption>
    </figure>
  );
}

function Candidates(props: { rows: Candidate[] }) {
  const sizes = [...new Set(props.rows.flatMap((row) => Object.keys(row.ratios ?? {})))].sort((a, b) => Number(a) - Number(b));
  return (
    <Table label="forms of the race" rows={props.rows} keyOf={(row) => row.candidate} columns={[
      { name: "Form", cell: (row) => <>{row.candidate} {row.lossy && <Badge kind="warn">fewer digits</Badge>}</>, by: (row) => row.candidate },
      {
        name: "Verdict",
        cell: (row) => {
          const [kind, words] = VERDICTS[row.verdict] ?? ["plain", row.verdict];
          return <><Badge kind={kind}>{words}</Badge>{row.why && <div class="hint">{row.why}</div>}</>;
        },
        by: (row) => row.verdict,
        long: true,
      },
      { name: "As fast", cell: (row) => times(row.ratio), by: (row) => row.ratio ?? null, right: true },
      ...sizes.map((size) => ({ name: size === "1" ? "1 row" : `${size} rows`, cell: (row: Candidate) => times(row.ratios?.[size]), by: (row: Candidate) => row.ratios?.[size] ?? null, right: true })),
      { name: "Least cosine", cell: (row) => row.cosine_min?.toFixed(5) ?? "–", by: (row) => row.cosine_min ?? null, right: true },
      { name: "Same class", cell: (row) => (row.agreement_min == null ? "–" : `${(100 * row.agreement_min).toFixed(1)} %`), by: (row) => row.agreement_min ?? null, right: true },
      {
        name: "Compiled",
        cell: (row) => <>{row.compile_s ? `in ${seconds(row.compile_s)}` : "–"}<div class="hint">{row.size_bytes ? bytes(row.size_bytes) : ""}</div></>,
        by: (row) => row.compile_s ?? null,
        right: true,
      },
    ]} />
  );
}

function Forms(props: { variants: Variant[]; races: RaceSummary[] }) {
  if (!props.variants.length && !props.races.length) return null;
  return (
    <div class="cards">
      <Card title="Compiled forms on disk" wide>
        <Table label="compiled forms" rows={props.variants} keyOf={(one) => one.name} empty="None is kept." columns={[
          { name: "Form", cell: (one) => one.name, by: (one) => one.name },
          { name: "Compiled by", cell: (one) => one.runtime },
          { name: "For", cell: (one) => one.device },
          { name: "Took", cell: (one) => seconds(one.seconds), by: (one) => one.seconds, right: true },
          { name: "Size", cell: (one) => bytes(one.size_bytes), by: (one) => one.size_bytes, right: true },
          { name: "Use", cell: (one) => (one.refused ? <><Badge kind="warn">not used</Badge> {one.refused}</> : "may serve") },
        ]} />
      </Card>
      {props.races.length > 0 && (
        <Card title="Verdicts by kind of worker" wide>
          <Table label="verdicts" rows={props.races} keyOf={(one) => one.kind} columns={[
            { name: "Kind", cell: (one) => one.kind },
            { name: "State", cell: (one) => one.state },
            { name: "Winner", cell: (one) => (one.state === "decided" ? (one.winner ?? "its own file") : "–") },
            { name: "As fast", cell: (one) => times(one.state === "decided" ? one.ratio : null), right: true },
            { name: "Serves", cell: (one) => (one.serving ? <Badge kind="good">yes</Badge> : one.undone ? `no: ${one.undone}` : "no") },
          ]} />
        </Card>
      )}
    </div>
  );
}
