// API keys: who may do what, how much, and what they used.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { admin, get, request, send, session } from "../api";
import { Check, Field } from "../fields";
import { useDraft, useLoaded } from "../loaded";
import { link } from "../router";
import { Table, type Column } from "../table";
import { Ago, Badge, Button, Card, Code, Confirm, ErrorLine, Head, Pending } from "../ui";
import { ago, bytes, count, seconds, when } from "../units";
import { changesOf, draftOf, KeyFields, limitsText, NEW_DRAFT, newKeyOf, type Key } from "./key_fields";

interface KeyWithSecret extends Key {
  key: string;
}
interface Use {
  allowed: number;
  refused: number;
  rows: number;
  run_s: number;
}
type Act = "edit" | "rotate" | "revoke" | "forget";

const FAMILIES = ["millstream_key_requests_total", "millstream_key_rows_total", "millstream_key_run_seconds_total"];

/** Reads what each key used from the metrics page, by the name of the key, since the gateways started. */
export function usesOf(page: string): Map<string, Use> {
  const found = new Map<string, Use>();
  for (const line of page.split("\n")) {
    const family = FAMILIES.find((name) => line.startsWith(`${name}{`));
    const name = family && /[{,]key="([^"]*)"/.exec(line)?.[1];
    if (!family || name === undefined) continue;
    const use = found.get(name) ?? { allowed: 0, refused: 0, rows: 0, run_s: 0 };
    const value = Number(line.slice(line.lastIndexOf("}") + 1).trim().split(" ")[0]);
    if (family === FAMILIES[1]) use.rows += value;
    else if (family === FAMILIES[2]) use.run_s += value;
    else if (line.includes('outcome="allowed"')) use.allowed += value;
    else use.refused += value;
    found.set(name, use);
  }
  return found;
}

function state(key: Key) {
  if (key.state === "live") return <Badge kind="good">live</Badge>;
  return <Badge kind="bad">{key.state}{key.revoked_at ? ` ${ago(key.revoked_at)}` : ""}</Badge>;
}

function columnsFor(uses: Map<string, Use> | null, ask: (act: Act, key: Key) => void): Column<Key>[] {
  const use = (key: Key) => uses?.get(key.name);
  return [
    { name: "Name", cell: (key) => <>{key.name}<div class="hint">{key.id}</div></>, by: (key) => key.name },
    { name: "State", cell: (key) => <>{state(key)}{key.secrets.length > 1 && <div class="hint">the secret before is accepted until {when(key.secrets.find((one) => one.expires_at)?.expires_at)}</div>}</>, by: (key) => key.state },
    { name: "May", cell: (key) => key.scopes.map((scope) => <div key={scope}><code>{scope}</code></div>) },
    { name: "Limits", cell: (key) => limitsText(key).map((text) => <div class="whole" key={text}>{text}</div>) },
    {
      name: "Created",
      cell: (key) => (
        <>
          <Ago at={key.created_at} />
          <div class="hint">{key.expires_at ? `ends ${when(key.expires_at)}` : "does not end"}</div>
        </>
      ),
      by: (key) => key.created_at,
    },
    {
      name: "Used",
      cell: (key) => {
        const used = use(key);
        if (!used) return "–";
        return (
          <>
            {count(used.allowed)} calls{used.refused > 0 && `, ${count(used.refused)} refused`}
            {used.rows > 0 && <div class="hint whole">{count(used.rows)} rows</div>}
            {used.run_s > 0 && <div class="hint whole">runs of {seconds(used.run_s)}</div>}
            {key.memory_taken_bytes > 0 && <div class="hint whole">models of {bytes(key.memory_taken_bytes)}</div>}
          </>
        );
      },
      by: (key) => use(key)?.allowed ?? null,
    },
    {
      name: "Change",
      cell: (key) => {
        const act = (kind: Act, text: string, danger = false) => (
          <Button kind={danger ? "danger" : "plain"} aria-label={`${text} the key ${key.name}`} onClick={() => ask(kind, key)}>{text}</Button>
        );
        return (
          <div class="row-actions">
            {key.state === "live" ? <>{act("edit", "Edit")}{act("rotate", "Rotate")}{act("revoke", "Revoke", true)}</> : act("forget", "Forget", true)}
            <a href={link(["audit"], { key: key.id })} aria-label={`audit log of the key ${key.name}`}>Audit</a>
          </div>
        );
      },
    },
  ];
}

export function KeysPage() {
  const keys = useLoaded((abort) => get<{ keys: Key[]; damaged: string[] }>(admin("keys"), abort), [], 15);
  const uses = useLoaded(async (abort) => usesOf(await (await request("call/metrics", { signal: abort })).text()), []);
  const [dialog, open] = useState<JSX.Element | null>(null);
  const [made, setMade] = useState<KeyWithSecret | null>(null);
  const [ended, setEnded] = useState(false);
  const shown = keys.value?.keys.filter((key) => ended || key.state === "live") ?? [];
  const done = () => {
    open(null);
    keys.reload();
    uses.reload();
  };
  const end = async (id: string, query = "") => {
    await send("DELETE", `${admin("keys", id)}${query}`);
    setMade((shown) => (shown?.id === id ? null : shown));
  };
  const forget = (id: string, name: string) => open(
    <Confirm danger title={`Forget ${name}?`} action="Forget" onDone={done} run={() => end(id, "?forget=true")}>
      <p>Its document is removed; the audit log keeps what it did. If it is the last document of a key, calls need no key any more.</p>
    </Confirm>,
  );
  const ask = (act: Act, key: Key) => {
    if (act === "edit") open(<Edit of={key} onDone={done} />);
    else if (act === "rotate") open(<Rotate of={key} onDone={done} onMade={setMade} />);
    else if (act === "forget") forget(key.id, key.name);
    else open(
      <Confirm danger title={`Revoke ${key.name}?`} action="Revoke" onDone={done} run={() => end(key.id)}>
        <p>From now on every gateway refuses it, and whoever is signed in with it is signed out. It cannot be made live again.</p>
      </Confirm>,
    );
  };
  return (
    <>
      <Head title="Keys"><Button kind="main" onClick={() => open(<Create onDone={done} onMade={setMade} />)}>Create a key</Button></Head>
      {session.value?.keys_required === false && (
        <p class="note">There is no key: whoever reaches this server may call its models. With the first key, every call needs one.</p>
      )}
      {made && (
        <Card title={`The secret of ${made.name}`} aside={<Button onClick={() => setMade(null)}>I have it</Button>}>
          <p role="status">It is shown this once: the server keeps only its digest. Send it as <code>Authorization: Bearer</code>.</p>
          <Code label={`secret of the key ${made.name}`} text={made.key} />
        </Card>
      )}
      <Pending of={keys} />
      {keys.value && (
        <Card title="API keys" aside={<Check title="with revoked and expired ones" checked={ended} onCheck={setEnded} />}>
          <Table label="API keys" columns={columnsFor(uses.value, ask)} rows={shown} keyOf={(key) => key.id} sort="Name" empty="There is no live key." />
          <p class="hint">
            Calls, rows and runs are since the gateways started, the memory of its models is now. <Button onClick={() => (uses.reload(), keys.reload())}>Read anew</Button>
          </p>
          <ErrorLine error={uses.error} />
          {keys.value.damaged.map((id) => (
            <p key={id} class="problem">
              The document of the key <code>{id}</code> cannot be read, so the key is refused.{" "}
              <Button kind="danger" aria-label={`Forget the key ${id}`} onClick={() => forget(id, id)}>Forget</Button>
            </p>
          ))}
        </Card>
      )}
      {dialog}
    </>
  );
}

function Create(props: { onDone: () => void; onMade: (key: KeyWithSecret) => void }) {
  const [draft, set, forget] = useDraft("new key", NEW_DRAFT);
  const run = async () => {
    props.onMade(await send<KeyWithSecret>("POST", admin("keys"), newKeyOf(draft)));
    forget();
  };
  return (
    <Confirm title="Create a key" action="Create" onDone={props.onDone} run={run}>
      <Field title="Name" required maxLength={64} pattern="[A-Za-z0-9][A-Za-z0-9._\-]*" says="letters, digits, '.', '_' and '-'" autocomplete="off"
        hint="Metrics, logs and the audit log show it." value={draft.name} onText={(name) => set({ name })} />
      <KeyFields draft={draft} set={set} />
    </Confirm>
  );
}

function Edit(props: { of: Key; onDone: () => void }) {
  const [draft, set, forget] = useDraft(`key ${props.of.id} ${props.of.generation}`, draftOf(props.of));
  const run = async () => {
    await send("PATCH", admin("keys", props.of.id), changesOf(props.of, draft));
    forget();
  };
  return (
    <Confirm title={`Change ${props.of.name}`} action="Save" onDone={props.onDone} run={run}>
      <p class="hint">It keeps its secret. All gateways know the change when it is saved.</p>
      <KeyFields draft={draft} set={set} />
    </Confirm>
  );
}

function Rotate(props: { of: Key; onDone: () => void; onMade: (key: KeyWithSecret) => void }) {
  const [hours, setHours] = useState("24");
  const run = async () =>
    props.onMade(await send<KeyWithSecret>("POST", admin("keys", props.of.id, "rotate"), { grace_s: 3600 * Number(hours) }));
  return (
    <Confirm title={`Give ${props.of.name} a new secret?`} action="Rotate" onDone={props.onDone} run={run}>
      <p>The new secret is shown once. Name, scopes and limits stay.</p>
      <Field title="Hours for which the present secret is accepted, too" type="number" required min={0} max={720} step="any" value={hours} onText={setHours} />
    </Confirm>
  );
}
