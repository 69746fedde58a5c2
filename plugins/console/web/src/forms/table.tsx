// A table from CSV: a column for each of the model's.
import { useState } from "preact/hooks";
import type { Metadata } from "../documents";
import { Drop, Field } from "../fields";
import { useKept } from "../loaded";
import { ErrorLine, textOf } from "../ui";
import { AskForm } from "./ask_form";
import type { TensorValue } from "./call";
import type { Value } from "./example";
import type { FormProps } from "./kinds";

const ROWS_MAX = 10_000;
const FILE_BYTES_MAX = 4 * 1024 * 1024;

/** The cells of a CSV text, with commas, semicolons or tabs between, and quotes around cells that need them. */
export function parseCsv(text: string): string[][] {
  const head = text.slice(0, text.indexOf("\n") < 0 ? undefined : text.indexOf("\n"));
  const mark = [",", ";", "\t"].reduce((best, one) => (head.split(one).length > head.split(best).length ? one : best), ",");
  const rows: string[][] = [];
  let row: string[] = [];
  let cell = "";
  let quoted = false;
  const endRow = () => {
    row.push(cell);
    if (row.length > 1 || row[0]?.trim()) rows.push(row);
    row = [];
    cell = "";
  };
  for (let at = 0; at < text.length; at++) {
    const one = text[at];
    if (quoted) {
      if (one !== '"') cell += one;
      else if (text[at + 1] === '"') cell += text[++at];
      else quoted = false;
    } else if (one === '"' && !cell) quoted = true;
    else if (one === mark) {
      row.push(cell);
      cell = "";
    } else if (one === "\n") endRow();
    else if (one !== "\r") cell += one;
  }
  endRow();
  return rows;
}

function csvCell(value: unknown): string {
  const text = String(value);
  return /[",\n;\t]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function exampleCsv(metadata: Metadata): string {
  const usage = metadata.parameters?.usage;
  const known = new Map(usage?.example?.inputs.map((one) => [one.name, one.data[0]]));
  const columns = usage?.columns ?? [];
  return `${columns.map(csvCell).join(",")}\n${columns.map((name) => csvCell(known.get(name) ?? 0)).join(",")}\n`;
}

function valueOf(cell: string, datatype: string, where: string): Value {
  const text = cell.trim();
  if (datatype === "BYTES") return cell;
  if (datatype === "BOOL" && /^(true|false|0|1)$/i.test(text)) return /^(true|1)$/i.test(text);
  const number = Number(text);
  if (!text || Number.isNaN(number)) throw new Error(`${where}: "${text}" is no number`);
  if (/INT/.test(datatype) && !Number.isInteger(number)) throw new Error(`${where}: "${text}" is no whole number`);
  return number;
}

function tensorsOf(metadata: Metadata, text: string): TensorValue[] {
  const columns = metadata.parameters?.usage?.columns ?? [];
  const rows = parseCsv(text);
  const head = rows[0]?.map((one) => one.trim()) ?? [];
  const named = columns.some((name) => head.includes(name));
  const body = named ? rows.slice(1) : rows;
  if (!body.length) throw new Error("The table has no rows.");
  if (body.length > ROWS_MAX) throw new Error(`The table has ${body.length.toLocaleString("en")} rows: this page sends at most ${ROWS_MAX.toLocaleString("en")}.`);
  if (!named && head.length !== columns.length) throw new Error(`A row has ${head.length} cells, and the model ${columns.length} columns: name them in the first row.`);
  const examples = new Map(metadata.parameters?.usage?.example?.inputs.map((one) => [one.name, one]));
  const own = new Map(metadata.inputs.map((one) => [one.name, one]));
  const used = columns.filter((name) => examples.size === 0 || examples.has(name));
  return used.map((name) => {
    const at = named ? head.indexOf(name) : columns.indexOf(name);
    if (at < 0) throw new Error(`The table has no column "${name}".`);
    const like = examples.get(name) ?? own.get(name) ?? metadata.inputs[0];
    const cells = body.map((row) => row[at] ?? "");
    const datatype = like?.datatype ?? (cells.every((cell) => cell.trim() && !Number.isNaN(Number(cell))) ? "FP64" : "BYTES");
    const column = (examples.get(name)?.shape ?? own.get(name)?.shape ?? []).length === 2;
    const data = cells.map((cell, row) => valueOf(cell, datatype, `row ${row + 1}, ${name}`));
    return { name, datatype, shape: column ? [data.length, 1] : [data.length], data };
  });
}

export function TableForm({ metadata, kept, busy, send }: FormProps) {
  const [text, setText] = useKept(kept, exampleCsv(metadata));
  const [error, setError] = useState<unknown>(null);
  const read = async (file: File) => {
    if (file.size > FILE_BYTES_MAX) return setError(new Error(`${file.name} is larger than 4 MiB: send it with \`millstream predict ${metadata.name} --input FILE.csv\`.`));
    try {
      setText(await file.text());
      setError(null);
    } catch (failure) {
      setError(new Error(`${file.name} cannot be read: ${textOf(failure)}`));
    }
  };
  return (
    <AskForm ask={() => ({ inputs: tensorsOf(metadata, text) })} send={send} disabled={busy || !text.trim()} reset={() => setText(exampleCsv(metadata))}>
      <Drop label="CSV file" accept=".csv,.tsv,text/csv,text/plain" onFile={(file) => void read(file)}>Drop a CSV file here, or choose one, or write below.</Drop>
      <ErrorLine error={error} />
      <Field title="Rows, with the names of the columns in the first one" lines={10} value={text} onText={setText} />
    </AskForm>
  );
}
