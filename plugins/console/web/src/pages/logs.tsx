// What the processes of this machine log: the newest lines, then each new one as it is written.
import { useEffect, useRef, useState } from "preact/hooks";
import { get } from "../api";
import { Field } from "../fields";
import { place, setQuery } from "../router";
import { Badge, Button, Empty, ErrorLine, Head } from "../ui";
import { timeOfDay, when } from "../units";

interface Line {
  at: number | string;
  process: string;
  level: string;
  text: string;
}

const KEPT = 2000;
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];
const FLUSH_MS = 250; // a burst of lines is one change of the page
const TYPED_MS = 400;
const RETRY_MS = 3000;

function identity(line: Line): string {
  return `${line.at} ${line.process} ${line.text}`;
}

function newest(lines: Line[], more: Line[]): Line[] {
  return [...lines, ...more].slice(-KEPT);
}

/** Follows the lines that match. Lines that come while `paused` are kept for later, at most KEPT. */
function useLines(query: string, paused: boolean) {
  const [lines, setLines] = useState<Line[]>([]);
  const [processes, setProcesses] = useState<string[]>([]);
  const [state, setState] = useState<"loading" | "live" | "lost">("loading");
  const [error, setError] = useState<unknown>(null);
  const [waiting, setWaiting] = useState(0);
  const arrived = useRef<Line[]>([]);
  const held = useRef(paused);
  held.current = paused;

  useEffect(() => {
    let source: EventSource | null = null;
    let retry = 0;
    const abort = new AbortController();
    const flush = () => {
      setWaiting(held.current ? arrived.current.length : 0);
      if (held.current || !arrived.current.length) return;
      const more = arrived.current;
      arrived.current = [];
      setLines((before) => newest(before, more));
    };
    const load = async () => {
      try {
        const found = await get<{ lines: Line[]; processes: string[] }>(`logs?${query}`, abort.signal);
        setProcesses(found.processes);
        setError(null);
        setLines((before) => {
          const known = new Set(before.map(identity));
          return newest(before, found.lines.filter((line) => !known.has(identity(line))));
        });
      } catch (failure) {
        if (!abort.signal.aborted) setError(failure);
      }
    };
    // Lines that are written between the stream's start and the reading come by both: the known ones are left out.
    const follow = () => {
      source = new EventSource(`api/events?logs=1&${query}`);
      source.onopen = () => {
        setState("live");
        void load();
      };
      source.addEventListener("log", (event) => {
        arrived.current = newest(arrived.current, [JSON.parse((event as MessageEvent<string>).data) as Line]);
      });
      source.onerror = () => {
        source?.close();
        setState("lost");
        retry = window.setTimeout(follow, RETRY_MS);
      };
    };
    arrived.current = [];
    setLines([]);
    setState("loading");
    follow();
    const timer = setInterval(flush, FLUSH_MS);
    return () => {
      abort.abort();
      source?.close();
      clearTimeout(retry);
      clearInterval(timer);
    };
  }, [query]);

  const older = async () => {
    try {
      const found = await get<{ lines: Line[] }>(`logs?${query}${query ? "&" : ""}before=${encodeURIComponent(String(lines[0]?.at ?? ""))}`);
      setLines((before) => [...found.lines, ...before].slice(0, KEPT));
      return found.lines.length > 0;
    } catch (failure) {
      setError(failure);
      return true;
    }
  };
  return { lines, processes, state, error, waiting, older };
}

function choices(names: string[], words = (name: string) => name): [string, string][] {
  return [["", "all"], ...[...new Set(names)].filter(Boolean).map((name): [string, string] => [name, words(name)])];
}

export function LogsPage() {
  const query = place.value.query;
  const chosen = { process: query.get("process") ?? "", level: query.get("level") ?? "", text: query.get("text") ?? "" };
  const asked = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value)).toString();
  const [paused, setPaused] = useState(false);
  const [all, setAll] = useState(false);
  const { lines, processes, state, error, waiting, older } = useLines(asked, paused);
  const [text, setText] = useState(chosen.text);
  const box = useRef<HTMLDivElement>(null);
  const follow = useRef(true);
  const choose = (name: string, value: string) => setQuery({ ...chosen, [name]: value });
  useEffect(() => {
    const typed = setTimeout(() => choose("text", text), TYPED_MS);
    return () => clearTimeout(typed);
  }, [text]);
  useEffect(() => setAll(false), [asked]);
  useEffect(() => {
    if (box.current && follow.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  const scrolled = () => {
    const at = box.current;
    if (at) follow.current = at.scrollHeight - at.scrollTop - at.clientHeight < 40;
  };
  const showOlder = async () => {
    follow.current = false;
    setPaused(true); // new lines would push the older ones out
    if (!(await older())) setAll(true);
  };
  return (
    <>
      <Head title="Logs">
        {paused ? <Badge kind="warn">paused{waiting ? `, ${waiting} more lines` : ""}</Badge>
          : state === "live" ? <Badge kind="good">live</Badge>
          : state === "lost" ? <Badge kind="bad">lost, trying again</Badge> : <Badge>connecting</Badge>}
      </Head>
      <form class="filters" role="search" aria-label="filters of the log" onSubmit={(event) => event.preventDefault()}>
        <Field title="Process" value={chosen.process} options={choices([...processes, chosen.process])} onText={(process) => choose("process", process)} />
        <Field title="Least level" value={chosen.level} options={choices(LEVELS, (level) => level.toLowerCase())} onText={(level) => choose("level", level)} />
        <Field title="Text" type="search" value={text} onText={setText} />
        <Button aria-pressed={paused} onClick={() => (setPaused(!paused), (follow.current = true))}>{paused ? "Go on" : "Pause"}</Button>
        <Button disabled={all || !lines.length || lines.length >= KEPT} onClick={() => void showOlder()}>Older lines</Button>
      </form>
      <ErrorLine error={error} />
      <div class="lines" ref={box} onScroll={scrolled} tabIndex={0} role="log" aria-live="off" aria-label="log lines, the newest last">
        {!lines.length && state !== "loading" && <Empty>No line matches yet.</Empty>}
        {lines.map((line, at) => (
          <p key={at} class={line.level === "WARNING" ? "warning-line" : ["ERROR", "CRITICAL"].includes(line.level) ? "error-line" : ""}>
            <span title={when(line.at)}>{timeOfDay(line.at)}</span>
            <span>{line.process}</span>
            <b>{line.level.toLowerCase()}</b> {line.text}
          </p>
        ))}
      </div>
      <p class="hint">At most {KEPT.toLocaleString("en")} lines are kept in the page, of the processes of this machine.</p>
    </>
  );
}
