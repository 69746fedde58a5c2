// What was changed through the admin API, by whom: the newest first, a page at a time.
import { admin, get } from "../api";
import { Field } from "../fields";
import { useLoaded } from "../loaded";
import { link, place, setQuery } from "../router";
import { Table, type Column } from "../table";
import { Badge, Button, Card, Head, Pending } from "../ui";
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
  const loaded = useLoaded((abort) => get<{ entries: Entry[] }>(`${admin("audit")}?${asked}`, abort), [asked.toString()]);
  const newest = loaded.value && [...loaded.value.entries].reverse();
  const rows = newest?.slice(0, PAGE) ?? [];
  const oldest = rows.at(-1);
  const filter = (name: string, text: string) => setQuery({ ...chosen, [name]: text.trim() });
  return (
    <>
      <Head title="Audit"><Button onClick={() => (before ? setQuery(chosen) : loaded.reload())}>{before ? "Newest" : "Read anew"}</Button></Head>
      <Card>
        <form class="filters" role="search" aria-label="filters of the audit log" onSubmit={(event) => event.preventDefault()}>
          <Field late title="Key, by id or name" type="search" value={chosen.key} onText={(text) => filter("key", text)} />
          <Field late title="Model, * for any characters" type="search" value={chosen.model} onText={(text) => filter("model", text)} />
          <Field late title="From" type="datetime-local" value={chosen.since} onText={(text) => filter("since", text)} />
          <Field late title="Until" type="datetime-local" value={chosen.until} onText={(text) => filter("until", text)} />
          {FILTERS.some((name) => chosen[name]) && <Button onClick={() => setQuery({})}>All entries</Button>}
        </form>
        <Pending of={loaded} />
        {newest && (
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
