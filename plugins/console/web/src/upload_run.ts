// The upload of this page. It goes on while other pages are looked at, and keeps its file and fields until it is done.
import { signal } from "@preact/signals";
import { admin, upload } from "./api";
import type { Version } from "./documents";

export interface Fields {
  name: string;
  version: string;
  activate: boolean;
  pickle: boolean;
  code: boolean;
  inputs: string;
  config: string;
}
/** "cancelled" and "failed" are ends; what follows "loading" is the version's own state. */
export type Stage = "sending" | "checking" | "loading" | "done" | "failed" | "cancelled";

export interface Run {
  model: string;
  stage: Stage;
  sent: number;
  total: number;
  began: number;
  version: (Version & { existing?: boolean }) | null;
  error: unknown;
}

/** What was chosen, until another file is. */
export const chosen = signal<File | null>(null);
export const run = signal<Run | null>(null);
let abort = new AbortController();

export function isBusy(): boolean {
  return run.value?.stage === "sending" || run.value?.stage === "checking";
}

export function change(now: Partial<Run>): void {
  if (run.value) run.value = { ...run.value, ...now };
}

export function choose(file: File | null): void {
  chosen.value = file;
  run.value = null;
}

export function cancel(): void {
  abort.abort();
}

function callOf(fields: Fields): [method: string, path: string] {
  const query = new URLSearchParams();
  if (!fields.activate) query.set("activate", "false");
  if (fields.pickle) query.set("allow_pickle", "true");
  if (fields.code) query.set("allow_code", "true");
  for (const line of fields.inputs.split("\n")) if (line.trim()) query.append("input", line.trim());
  if (fields.config.trim()) query.set("config", fields.config);
  const version = fields.version.trim();
  const path = version ? admin("models", fields.name.trim(), "versions", version) : admin("models", fields.name.trim(), "versions");
  const asked = query.toString();
  return [version ? "PUT" : "POST", asked ? `${path}?${asked}` : path];
}

export async function start(fields: Fields): Promise<void> {
  const file = chosen.value;
  if (!file || isBusy()) return;
  abort = new AbortController();
  run.value = { model: fields.name.trim(), stage: "sending", sent: 0, total: file.size, began: Date.now(), version: null, error: null };
  const [method, path] = callOf(fields);
  try {
    const text = await upload(method, path, file, ({ sent, total }) => change({ sent, total, stage: sent >= total ? "checking" : "sending" }), abort.signal);
    change({ version: JSON.parse(text) as Version, stage: "loading" });
  } catch (error) {
    change({ error, stage: abort.signal.aborted ? "cancelled" : "failed" });
  }
}

// The browser asks before a reload or the end of the page, either of which would end the upload.
addEventListener("beforeunload", (event) => isBusy() && event.preventDefault());
