// An answer as people read it: labels, best values, tables; and the JSON, cut where it is long.
import { useEffect, useState } from "preact/hooks";
import type { Metadata } from "../documents";
import { Table } from "../table";
import { Bar, Empty, Tabs } from "../ui";
import { bytes, seconds } from "../units";
import type { Answer, Output } from "./call";
import { elements, type Value } from "./example";

const RAW_BYTES_MAX = 20 * 1024;
const ROWS_MAX = 200;
const COLUMNS_MAX = 16;
const BEST = 5;

const PARTS: Record<string, string> = { lane: "until it was in the queue", queue: "in the queue", run: "in the model" };

/** What a part of the time is: "read.queue" is that of a step of a graph. */
function partWords(name: string): string {
  const step = name.replace(/\.(queue|run)$/, "");
  if (step === name) return PARTS[name] ?? name;
  return name.endsWith(".run") ? `in the run of ${step}` : `until the run of ${step}`;
}

function shortened(value: Value | undefined): string {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));
  const text = String(value ?? "");
  return text.length > 2000 ? `${text.slice(0, 2000)}…` : text;
}

export function AnswerView({ answer }: { metadata: Metadata; answer: Answer }) {
  const [open, setOpen] = useState("read");
  return (
    <>
      <Time answer={answer} />
      <Tabs names={[["read", "Readable"], ["raw", "JSON"]]} active={open} onPick={setOpen} />
      {open === "raw" ? <Raw text={answer.text} /> : <Readable outputs={answer.outputs} />}
    </>
  );
}

export function Time({ answer }: { answer: Answer }) {
  // Of a graph, the whole is known; its steps may run at the same time.
  const whole = answer.parts.find((part) => part.name === "total");
  const known = whole ? whole.seconds : answer.parts.reduce((total, part) => total + part.seconds, 0);
  const parts = answer.parts.length ? [...answer.parts.filter((part) => part !== whole), { name: "the way to the server and back", seconds: Math.max(0, answer.seconds - known) }] : [];
  return (
    <>
      <p>
        Answered in <b>{seconds(answer.seconds)}</b>{answer.version && ` by version ${answer.version}`}.
      </p>
      {parts.map((part) => <Bar key={part.name} used={part.seconds} total={answer.seconds} compares label={`${seconds(part.seconds)} ${partWords(part.name)}`} />)}
    </>
  );
}

export function Raw({ text }: { text: string }) {
  const [address, setAddress] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    setAddress(made);
    return () => URL.revokeObjectURL(made);
  }, [text]);
  const cut = text.length > RAW_BYTES_MAX;
  return (
    <>
      <pre tabIndex={0} aria-label="answer as JSON">{cut ? `${text.slice(0, RAW_BYTES_MAX)}…` : text}</pre>
      <p class="hint">
        {cut && `The first ${bytes(RAW_BYTES_MAX)} of ${bytes(text.length)}. `}
        <a href={address} download="answer.json">Download the whole answer</a>
      </p>
    </>
  );
}

/** Outputs with one value for each row are columns of one table; others are shown one by one. */
function Readable({ outputs }: { outputs: Output[] }) {
  const rows = outputs[0]?.shape[0] ?? 1;
  const single = outputs.filter((one) => !one.classes && elements(one.shape) === rows && rows > 0);
  const others = outputs.filter((one) => !single.includes(one));
  const shown = Array.from({ length: Math.min(rows, ROWS_MAX) }, (_, at) => at);
  return (
    <>
      {single.length > 0 && (
        <Table label="answer" rows={shown} keyOf={String} columns={[
          ...(rows > 1 ? [{ name: "Row", cell: (at: number) => at + 1 }] : []),
          ...single.map((one) => ({ name: one.name, cell: (at: number) => shortened(one.data[at]) })),
        ]} />
      )}
      {single.length > 0 && rows > ROWS_MAX && <p class="hint">The first {ROWS_MAX} of {rows} rows; the JSON has all.</p>}
      {others.map((one) => (
        <section key={one.name}>
          <h3>{one.name}</h3>
          <p class="hint">{one.datatype} [{one.shape.join(", ")}]</p>
          {one.classes ? <Classes output={one} /> : <Values output={one} />}
        </section>
      ))}
      {!outputs.length && <Empty>The answer has no outputs.</Empty>}
    </>
  );
}

interface Ranked {
  name: string;
  score: number;
}

/** The rows of an output, each with its best values. */
function RankedRows(props: { rows: Ranked[][]; label: string }) {
  return (
    <>
      {props.rows.slice(0, 10).map((row, at) => {
        const most = Math.max(...row.map((one) => Math.abs(one.score)), 0);
        return (
          <div key={at}>
            {props.rows.length > 1 && <h3>Row {at + 1}</h3>}
            <Table label={`${props.label}, row ${at + 1}`} rows={row} keyOf={(one) => one.name} columns={[
              { name: "Class", cell: (one) => one.name },
              { name: "Value", cell: (one) => <Bar used={Math.max(0, one.score)} total={most || 1} compares label={shortened(one.score)} /> },
            ]} />
          </div>
        );
      })}
      {props.rows.length > 10 && <p class="hint">The first 10 of {props.rows.length} rows; the JSON has all.</p>}
    </>
  );
}

function Classes({ output }: { output: Output }) {
  const width = output.shape.at(-1) ?? 1;
  const rows = split(output.data, width).map((row) =>
    row.map((one) => {
      const [score = "", index = "", ...label] = String(one).split(":");
      return { name: label.length ? label.join(":") : `class ${index}`, score: Number(score) };
    }),
  );
  return <RankedRows rows={rows} label={output.name} />;
}

function split(data: Value[], width: number): Value[][] {
  return Array.from({ length: Math.ceil(data.length / Math.max(1, width)) }, (_, at) => data.slice(at * width, (at + 1) * width));
}

function Values({ output }: { output: Output }) {
  const width = output.shape.at(-1) ?? 1;
  const numbers = output.data.every((one) => typeof one === "number");
  if (numbers && output.shape.length === 2 && width > 1 && width <= 1_000_000) {
    const rows = split(output.data, width).map((row) =>
      row.map((score, at) => ({ name: String(at), score: Number(score) })).sort((a, b) => b.score - a.score).slice(0, BEST),
    );
    return (
      <>
        <p class="hint">The {Math.min(BEST, width)} largest of {width} values, by place.</p>
        <RankedRows rows={rows} label={output.name} />
      </>
    );
  }
  const rows = split(output.data, width).slice(0, ROWS_MAX);
  const columns = Math.min(width, COLUMNS_MAX);
  return (
    <>
      <Table label={output.name} rows={rows.map((row, at) => ({ row, at }))} keyOf={(one) => String(one.at)} empty="It is empty." columns={
        Array.from({ length: columns }, (_, column) => ({ name: String(column), cell: (one: { row: Value[] }) => shortened(one.row[column]), right: numbers }))
      } />
      {(width > columns || output.data.length / width > ROWS_MAX) && <p class="hint">Not all values are shown; the JSON has them.</p>}
    </>
  );
}
