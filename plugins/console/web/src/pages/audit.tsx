// What was changed through the admin API, by whom: the newest first, a page at a time.
import { admin, get } from "../api";
import { link, place, setQuery } from "../router";
import { Badge, Button, Card, ErrorLine, Table, useLoaded, type Column } from "../ui";
import { ago, when } from "../units";

interface Entry {
  at: number;
  by: string;
  key: string;
  address: string;
  what: string;
  target: string;
  outcome: number | string;
  model: string;
  changes: string[];
}

const PAGE = 100;
const FILTERS = ["key", "model", "since", "until"] as const;
/** The log counts milliseconds: entries of the same one as the last of a page are on the next page, too. */
const SAME_INSTANT_S = 0.0005;

/** The value of a field `datetime-local`, which is in the reader's zone, as seconds since the epoch. */
function instantOf(local: string): string {
  const at = new Date(local).getTime();
  return Number.isNaN(at) ? "" : String(at / 1000);
}

function succeeded(outcome: number | string): boolean {
  return typeof outcome === "number" ? outcome < 400 : outcome === "OK";
}

const columns: Column<Entry>[] = [
  { name: "When", cell: (row) => <time dateTime={new Date(row.at * 1000).toISOString()} title={ago(row.at)}>{when(row.at)}</time> },
  {
    name: "Who",
    cell: (row) => (
      <>
        <a href={link(["audit"], { key: row.by })} title="only what this key did">{row.by}</a>
        <div class="hint">{row.address}</div>
      </>
    ),
  },
  {
    name: "What",
    long: true,
    cell: (row) => (
      <>
        {row.what}
        <div class="hint">{row.target}</div>
      </>
    ),
  },
  { name: "Model", cell: (row) => row.model && <a href={link(["models", row.model])}>{row.model}</a> },
  { name: "Changes", cell: (row) => row.changes.map((text, at) => <div key={at}>{text}</div>), long: true },
  {
    name: "Outcome",
    cell: (row) => (succeeded(row.outcome) ? <Badge kind="good">done, {row.outcome}</Badge> : <Badge kind="bad">failed, {row.outcome}</Badge>),
  },
];

export function AuditPage() {
  const query = place.value.query;
  const chosen = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""])) as Record<(typeof FILTERS)[number], string>;
  const before = query.get("before") ?? "";
  const asked = new URLSearchParams({ limit: String(PAGE + 1) });
  if (chosen.key) asked.set("key", chosen.key);
  if (chosen.model) asked.set("model", chosen.model);
  const since = instantOf(chosen.since);
  const until = before || instantOf(chosen.until);
  if (since) asked.set("since", since);
  if (until) asked.set("until", until);
  const { value, error, reload } = useLoaded((abort) => get<{ entries: Entry[] }>(`${admin("audit")}?${asked}`, abort), [asked.toString()]);
  const newest = value && [...value.entries].reverse();
  const rows = newest?.slice(0, PAGE) ?? [];
  const oldest = rows.at(-1);
  const filter = (name: string, text: string) => setQuery({ ...chosen, [name]: text.trim() });
  return (
    <>
      <div class="head">
        <h1>Audit</h1>
        <Button onClick={() => (before ? setQuery(chosen) : reload())}>{before ? "Newest" : "Read anew"}</Button>
      </div>
      <Card>
        <form class="filters" role="search" aria-label="filters of the audit log" onSubmit={(event) => event.preventDefault()}>
          <Filter name="Key, by id or name" value={chosen.key} onChange={(text) => filter("key", text)} />
          <Filter name="Model, * for any characters" value={chosen.model} onChange={(text) => filter("model", text)} />
          <Filter name="From" type="datetime-local" value={chosen.since} onChange={(text) => filter("since", text)} />
          <Filter name="Until" type="datetime-local" value={chosen.until} onChange={(text) => filter("until", text)} />
          {FILTERS.some((name) => chosen[name]) && <Button onClick={() => setQuery({})}>All entries</Button>}
        </form>
        <ErrorLine error={error} again={reload} />
        {value && (
          <Table label="audit log" columns={columns} rows={rows} keyOf={(row) => `${row.at} ${row.target} ${row.by}`} rowsOfPage={PAGE}
            empty={FILTERS.some((name) => chosen[name]) ? "No change matches." : "Nothing was changed yet."} />
        )}
        {(before || (newest && newest.length > PAGE)) && (
          <nav class="pages" aria-label="pages of the audit log">
            <Button disabled={!before} onClick={() => setQuery(chosen)}>Newest</Button>
            <Button
              disabled={!newest || newest.length <= PAGE || !oldest}
              onClick={() => oldest && setQuery({ ...chosen, before: String(oldest.at + SAME_INSTANT_S) })}
            >
              Older
            </Button>
          </nav>
        )}
      </Card>
    </>
  );
}

function Filter(props: { name: string; value: string; type?: string; onChange: (text: string) => void }) {
  return (
    <label class="field">
      {props.name}
      <input type={props.type ?? "search"} value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)} />
    </label>
  );
}
