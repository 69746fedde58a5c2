// Documents that pages load and read again while they are looked at, and texts that a reload does not lose.
import { useEffect, useState } from "preact/hooks";
import { ApiError } from "./api";

const LOST_MS = 3000; // after which a server that could not be reached is asked again

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
    let runs = false;
    let again = 0;
    const run = async () => {
      // A slow server is not asked again before it has answered.
      if (runs) return;
      runs = true;
      try {
        const value = await load(abort.signal);
        if (!abort.signal.aborted) setState({ value, error: null });
      } catch (error) {
        if (abort.signal.aborted) return;
        setState((before) => ({ ...before, error }));
        if (error instanceof ApiError && error.status === 0) again = window.setTimeout(() => void run(), LOST_MS);
      }
      runs = false;
    };
    void run();
    const timer = every ? setInterval(() => document.hidden || void run(), every * 1000) : 0;
    return () => {
      abort.abort();
      clearInterval(timer);
      clearTimeout(again);
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

/** The fields of a form, kept as `useKept` does. The last function forgets what was written. */
export function useDraft<T extends object>(name: string, first: T): [draft: T, set: (change: Partial<T>) => void, forget: () => void, changed: boolean] {
  const [kept, keep] = useKept(name);
  let draft = first;
  try {
    draft = { ...first, ...(JSON.parse(kept) as Partial<T>) };
  } catch {
    // nothing is kept
  }
  return [draft, (change) => keep(JSON.stringify({ ...draft, ...change })), () => keep(""), !!kept];
}
