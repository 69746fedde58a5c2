// The parts that pages are made of. Texts of the server are only ever shown as text.
import { Fragment, type ComponentChildren, type JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "./api";
import { stateWords, type Tone } from "./documents";
import type { Loaded } from "./loaded";
import { ago, when } from "./units";

export function Button(props: JSX.HTMLAttributes<HTMLButtonElement> & { kind?: "main" | "danger" | "plain"; disabled?: boolean; type?: "button" | "submit" }) {
  const { kind = "plain", type = "button", ...rest } = props;
  return <button type={type} {...rest} class={`button ${kind}`} />;
}

/** The title of a page, and what can be done there. */
export function Head(props: { title: ComponentChildren; children?: ComponentChildren }) {
  return (
    <div class="head">
      <h1>{props.title}</h1>
      {props.children}
    </div>
  );
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

/** Facts with their names; those that are not known are left out. */
export function Facts(props: { of: [name: string, content: ComponentChildren][] }) {
  const known = props.of.filter(([, content]) => content != null && content !== false && content !== "");
  return <dl class="pairs">{known.map(([name, content], at) => <Fragment key={at}><dt>{name}</dt><dd>{content}</dd></Fragment>)}</dl>;
}

export function Badge(props: { kind?: Tone; children: ComponentChildren }) {
  return <span class={`badge ${props.kind ?? "plain"}`}>{props.children}</span>;
}

/** The state of a version or an instance. */
export function State(props: { of: string }) {
  const [kind, words] = stateWords(props.of);
  return <Badge kind={kind}>{words}</Badge>;
}

/** How long ago an instant was, with the instant itself for who points at it. */
export function Ago(props: { at: number | string | null | undefined }) {
  return <time title={when(props.at)}>{ago(props.at)}</time>;
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

/** What stands in place of a document that is not there yet, or above one that could not be read again. */
export function Pending({ of }: { of: Loaded<unknown> }) {
  if (of.error) return <ErrorLine error={of.error} again={of.reload} />;
  return of.value === null ? <Empty>Loading…</Empty> : null;
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
  const { names } = props;
  const move = (event: KeyboardEvent, at: number) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    const next = (at + step + names.length) % names.length;
    const name = names[next]?.[0];
    if (!step || name === undefined) return;
    props.onPick(name);
    ((event.currentTarget as HTMLElement).parentElement?.children[next] as HTMLElement).focus();
  };
  return (
    <div class="tabs" role="tablist">
      {names.map(([name, title], at) => (
        <button type="button" role="tab" key={name} aria-selected={name === props.active} tabIndex={name === props.active ? 0 : -1}
          onClick={() => props.onPick(name)} onKeyDown={(event) => move(event, at)}>
          {title}
        </button>
      ))}
    </div>
  );
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
