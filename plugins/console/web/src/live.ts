// What the server does now, by server-sent events while the page is looked at.
import { signal } from "@preact/signals";
import { get, session, signOutBecause, type Session } from "./api";

export interface Totals {
  requests_per_s: number | null;
  failed_per_s: number | null;
  invalid_per_s: number | null;
  refused_per_s: number | null;
  p50_s: number | null;
  p99_s: number | null;
  in_flight: number;
  queue_rows: number;
  gateways: number;
  gateways_ready: number;
  redis_memory_bytes: number;
}
export interface Endpoint {
  model: string;
  version: string;
  requests_per_s: number | null;
  failed_per_s: number | null;
  invalid_per_s: number | null;
  p50_s: number | null;
  p99_s: number | null;
  batch_rows: number | null;
  queue_rows: number;
  instances: number;
}
export interface Worker {
  worker: string;
  pool: string;
  device: string;
  busy: number | null;
  memory_used_bytes: number;
  memory_budget_bytes: number | null;
  resident_bytes: number | null;
  instances: number;
  draining: boolean;
}
export interface Problem {
  severity: "critical" | "warning";
  title: string;
  detail: string;
  action: string;
  model: string | null;
}
export interface Overview {
  at: number;
  totals: Totals;
  endpoints: Endpoint[];
  workers: Worker[];
  problems: Problem[];
}

/** The newest frame; null before the first. */
export const overview = signal<Overview | null>(null);
/** Whether frames come. "lost": the page tries again by itself. */
export const connection = signal<"waiting" | "live" | "lost">("waiting");

let source: EventSource | null = null;
let retry = 0;
let retryTimer = 0;

export function watch(): void {
  if (source || document.hidden) return;
  const opened = new EventSource("api/events");
  source = opened;
  opened.onopen = () => {
    connection.value = "live";
    retry = 0;
  };
  opened.addEventListener("overview", (event) => {
    overview.value = JSON.parse((event as MessageEvent<string>).data) as Overview;
    connection.value = "live";
  });
  opened.onerror = () => {
    unwatch();
    if (connection.value !== "lost") connection.value = "lost";
    // A stream that is refused says no reason: the session tells whether the key is still right.
    void get<Session>("session").then((now) => {
      if (session.value?.signed_in && !now.signed_in) signOutBecause("Your key is not valid any more.");
      else session.value = now;
    }, () => undefined);
    retry = Math.min(retry + 1, 6);
    retryTimer = window.setTimeout(watch, 500 * 2 ** retry);
  };
}

export function unwatch(): void {
  clearTimeout(retryTimer);
  source?.close();
  source = null;
}

// A page in the background costs the server nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? unwatch() : session.value?.can.watch && watch()));
