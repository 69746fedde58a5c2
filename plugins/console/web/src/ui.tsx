// The parts that pages are made of. Texts of the server are only ever shown as text.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "./api";

export function Button(props: JSX.HTMLAttributes<HTMLButtonElement> & { kind?: "main" | "danger" | "plain"; disabled?: boolean; type?: "button" | "submit" }) {
  const { kind = "plain", type = "button", ...rest } = props;
  return <button type={type} {...rest} class={`button ${kind}`} />;
}

export function Card(props: { title?: string; aside?: ComponentChildren; children: ComponentChildren; wide?: boolean }) {
  return (
    <section class={props.wide ? "card wide" : "card"}>
      {props.title && (
        <header>
          <h2>{props.title}</h2>
          {props.aside}
        </header>
      )}
      {props.children}
    </section>
  );
}

export function Figure(props: { name: string; value: string; note?: string; bad?: boolean }) {
  return (
    <div class={props.bad ? "figure bad" : "figure"}>
      <dt>{props.name}</dt>
      <dd>
        {props.value}
        {props.note && <small>{props.note}</small>}
      </dd>
    </div>
  );
}

export function Badge(props: { kind?: "good" | "bad" | "warn" | "plain"; children: ComponentChildren }) {
  return <span class={`badge ${props.kind ?? "plain"}`}>{props.children}</span>;
}

export function Empty(props: { children: ComponentChildren }) {
  return <p class="empty">{props.children}</p>;
}

export function textOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

export function ErrorLine(props: { error: unknown; again?: () => void }) {
  if (!props.error) return null;
  const lost = props.error instanceof ApiError && props.error.status === 0;
  return (
    <p class="error" role="alert">
      {textOf(props.error)}
      {props.again && <Button onClick={props.again}>{lost ? "Try again" : "Load again"}</Button>}
    </p>
  );
}

/** A bar of `used` of `total`. `compares`: a full one is no warning. */
export function Bar(props: { used: number; total: number | null; label: string; compares?: boolean }) {
  const share = props.total ? Math.min(1, Math.max(0, props.used / props.total)) : 0;
  return (
    <div class="bar-line">
      <meter class="bar" min={0} max={1} high={props.compares ? 1 : 0.9} value={share} aria-label={props.label} />
      <span>{props.label}</span>
    </div>
  );
}

/** A button that copies a text. */
export function Copy(props: { text: string; label?: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(props.text);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch {
      // pages that are not secure may not write: the text can be selected
    }
  };
  return <Button onClick={copy} aria-label={props.label && !copied ? props.label : undefined}>{copied ? "Copied" : "Copy"}</Button>;
}

export function Code(props: { text: string; label?: string }) {
  return (
    <div class="code">
      <pre tabIndex={0} aria-label={props.label ?? "code"}>{props.text}</pre>
      <Copy text={props.text} />
    </div>
  );
}

export function Tabs(props: { names: [string, string][]; active: string; onPick: (name: string) => void }) {
  const move = (event: KeyboardEvent, at: number) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    const next = props.names[(at + step + props.names.length) % props.names.length];
    if (!step || !next) return;
    props.onPick(next[0]);
    ((event.currentTarget as HTMLElement).parentElement?.children[(at + step + props.names.length) % props.names.length] as HTMLElement).focus();
  };
  return (
    <div class="tabs" role="tablist">
      {props.names.map(([name, title], at) => (
        <button
          type="button"
          role="tab"
          key={name}
          aria-selected={name === props.active}
          tabIndex={name === props.active ? 0 : -1}
          onClick={() => props.onPick(name)}
          onKeyDown={(event) => move(event, at)}
        >
          {title}
        </button>
      ))}
    </div>
  );
}

/** A place for a file: dropped or chosen. */
export function Drop(props: { label: string; accept?: string; onFile: (file: File) => void; children?: ComponentChildren }) {
  const [over, setOver] = useState(false);
  const take = (files: FileList | null | undefined) => files?.[0] && props.onFile(files[0]);
  return (
    <div
      class={over ? "drop over" : "drop"}
      onDragOver={(event) => (event.preventDefault(), setOver(true))}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        take(event.dataTransfer?.files);
      }}
    >
      {props.children}
      <input type="file" aria-label={props.label} accept={props.accept} onChange={(event) => {
        take(event.currentTarget.files);
        event.currentTarget.value = "";
      }} />
    </div>
  );
}

export interface Column<Row> {
  name: string;
  /** What is shown. */
  cell: (row: Row) => ComponentChildren;
  /** By what rows are sorted; without it the column cannot sort. */
  by?: (row: Row) => string | number | null;
  right?: boolean;
  /** Long text, which stays readable on a narrow screen. */
  long?: boolean;
}

const PAGE = 50;

/** A table with sorting and pages, so that 10,000 rows cost as much as 50. */
export function Table<Row>(props: {
  columns: Column<Row>[];
  rows: Row[];
  keyOf: (row: Row) => string;
  label: string;
  sort?: string;
  descending?: boolean;
  empty?: string;
  rowsOfPage?: number;
}) {
  const size = props.rowsOfPage ?? PAGE;
  const [sort, setSort] = useState({ name: props.sort ?? "", down: props.descending ?? false });
  const [page, setPage] = useState(0);
  const by = props.columns.find((column) => column.name === sort.name)?.by;
  const rows = by ? [...props.rows].sort((a, b) => compare(by(a), by(b)) * (sort.down ? -1 : 1)) : props.rows;
  const last = Math.max(0, Math.ceil(rows.length / size) - 1);
  const at = Math.min(page, last);
  if (!rows.length) return <Empty>{props.empty ?? "Nothing yet."}</Empty>;
  return (
    <>
      <div class="table" tabIndex={0} role="region" aria-label={props.label}>
        <table>
          <thead>
            <tr>
              {props.columns.map((column) => (
                <th
                  key={column.name}
                  scope="col"
                  class={column.right ? "right" : ""}
                  aria-sort={column.name === sort.name ? (sort.down ? "descending" : "ascending") : undefined}
                >
                  {column.by ? (
                    <button
                      type="button"
                      onClick={() => setSort({ name: column.name, down: column.name === sort.name ? !sort.down : !!column.right })}
                    >
                      {column.name}
                      <span aria-hidden="true">{column.name === sort.name ? (sort.down ? " ▾" : " ▴") : ""}</span>
                    </button>
                  ) : (
                    column.name
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(at * size, (at + 1) * size).map((row) => (
              <tr key={props.keyOf(row)}>
                {props.columns.map((column) => (
                  <td key={column.name} class={column.right ? "right" : column.long ? "long" : ""}>
                    {column.cell(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {last > 0 && (
        <nav class="pages" aria-label={`pages of ${props.label}`}>
          <Button disabled={at === 0} onClick={() => setPage(at - 1)}>Previous</Button>
          <span>
            {at * size + 1} to {Math.min(rows.length, (at + 1) * size)} of {rows.length}
          </span>
          <Button disabled={at === last} onClick={() => setPage(at + 1)}>Next</Button>
        </nav>
      )}
    </>
  );
}

function compare(a: string | number | null, b: string | number | null): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? -1 : 1;
  return typeof a === "string" && typeof b === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a < b ? -1 : a > b ? 1 : 0;
}

/** A question before a change. It says what the change means, and keeps its error until it is closed. */
export function Confirm(props: {
  title: string;
  action: string;
  danger?: boolean;
  onDone: () => void;
  run: () => Promise<unknown>;
  children?: ComponentChildren;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const act = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await props.run();
      props.onDone();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return (
    <dialog ref={dialog} onClose={props.onDone} aria-labelledby="question">
      <form onSubmit={act}>
        <h2 id="question">{props.title}</h2>
        {props.children}
        <ErrorLine error={error} />
        <div class="actions">
          <Button onClick={props.onDone}>Cancel</Button>
          <Button type="submit" kind={props.danger ? "danger" : "main"} disabled={busy}>
            {busy ? "Working…" : props.action}
          </Button>
        </div>
      </form>
    </dialog>
  );
}

export interface Loaded<T> {
  value: T | null;
  error: unknown;
  reload: () => void;
}

/** Loads a document when `on` changes, and again every `every` seconds while the page is looked at. */
export function useLoaded<T>(load: (abort: AbortSignal) => Promise<T>, on: unknown[], every = 0): Loaded<T> {
  const [state, setState] = useState<{ value: T | null; error: unknown }>({ value: null, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => setState({ value: null, error: null }), on);
  useEffect(() => {
    const abort = new AbortController();
    const run = async () => {
      try {
        const value = await load(abort.signal);
        if (!abort.signal.aborted) setState({ value, error: null });
      } catch (error) {
        if (!abort.signal.aborted) setState((before) => ({ ...before, error }));
      }
    };
    void run();
    const timer = every ? setInterval(() => document.hidden || void run(), every * 1000) : 0;
    return () => {
      abort.abort();
      clearInterval(timer);
    };
  }, [...on, turn]);
  return { ...state, reload: () => setTurn((before) => before + 1) };
}

/** A text that a reload of the page does not lose. `name` tells what it is, also which model's. */
export function useKept(name: string, first = ""): [string, (text: string) => void] {
  const stored = `console:${name}`;
  const [text, setText] = useState(() => sessionStorage.getItem(stored) ?? first);
  useEffect(() => setText(sessionStorage.getItem(stored) ?? first), [stored]);
  return [
    text,
    (next) => {
      setText(next);
      try {
        sessionStorage.setItem(stored, next);
      } catch {
        // more than the browser keeps: the text is only in the page
      }
    },
  ];
}
