// Calls of the server. All go through console/api/, which adds the key of the session's cookie.
import { signal } from "@preact/signals";

export interface Session {
  signed_in: boolean;
  name: string | null;
  can: { watch: boolean; read: boolean; write: boolean; keys: boolean; infer: boolean; metrics: boolean };
  keys_required: boolean;
  /** Why this session may not upload code; empty: it may. */
  no_code: string;
  version: string;
  prometheus: boolean;
  home: string | null;
}

/** An answer that is no success, in the server's words. `status` 0: the server cannot be reached. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** What the caller may see and do; null until the server has said it. */
export const session = signal<Session | null>(null);
/** Why the sign-in page is shown once more; empty: nothing happened. */
export const signedOutBecause = signal("");

const own = { "X-Millstream-Console": "1" };

function messageOf(text: string, status: number): string {
  try {
    const found = JSON.parse(text);
    const error = found.error ?? found.detail ?? found.message;
    const said = typeof error === "string" ? error : error?.message;
    if (typeof said === "string" && said) return said;
  } catch {
    // no JSON: a proxy's page, or plain text
  }
  const line = text.trim().startsWith("<") ? "" : (text.trim().split("\n")[0] ?? "");
  return line.slice(0, 500) || `the server answered ${status}`;
}

/** Throws ApiError. A key that is no longer right ends the session. */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  let reply: Response;
  try {
    reply = await fetch(`api/${path}`, { ...init, headers: { ...own, ...init.headers }, cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached");
  }
  if (reply.ok) return reply;
  const failure = new ApiError(reply.status, messageOf(await reply.text().catch(() => ""), reply.status));
  if (reply.status === 401 && path !== "session") signOutBecause("Your key is not valid any more.");
  throw failure;
}

export async function get<T>(path: string, abort?: AbortSignal): Promise<T> {
  return (await request(path, { signal: abort ?? null })).json() as Promise<T>;
}

/** Sends a change with a JSON body; undefined: without one. Returns the reply's document, or null if it has none. */
export async function send<T>(method: "POST" | "PUT" | "PATCH" | "DELETE", path: string, body?: unknown, abort?: AbortSignal): Promise<T> {
  const json = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const text = await (await request(path, { method, signal: abort ?? null, ...json })).text();
  return (text ? JSON.parse(text) : null) as T;
}

/** A path of the server's own API, for `get`, `send` and `request`: `admin("models", name)`. */
export function admin(...parts: string[]): string {
  return `call/admin/v1/${parts.map(encodeURIComponent).join("/")}`;
}

export async function readSession(): Promise<void> {
  session.value = await get<Session>("session");
}

// Other tabs have the same cookie: they learn that it has changed.
const tabs = new BroadcastChannel("millstream-console");
tabs.onmessage = () => void readSession().catch(() => undefined);

export async function signIn(key: string): Promise<void> {
  await send("POST", "session", { key });
  signedOutBecause.value = "";
  await readSession();
  tabs.postMessage("signed in");
}

export async function signOut(): Promise<void> {
  await send("DELETE", "session");
  await readSession();
  tabs.postMessage("signed out");
}

export function signOutBecause(reason: string): void {
  if (!session.value?.signed_in) return;
  signedOutBecause.value = reason;
  session.value = { ...session.value, signed_in: false, name: null };
  void signOut().catch(() => undefined);
}

export interface Progress {
  sent: number;
  total: number;
}

/** Sends a file with progress. Throws ApiError; `abort` ends it. */
export function upload(
  method: string,
  path: string,
  body: Blob,
  onProgress: (progress: Progress) => void,
  abort: AbortSignal,
): Promise<string> {
  return new Promise((resolve, reject) => {
    const call = new XMLHttpRequest();
    call.open(method, `api/${path}`);
    call.setRequestHeader("X-Millstream-Console", "1");
    call.setRequestHeader("Content-Type", "application/octet-stream");
    call.upload.onprogress = (event) => onProgress({ sent: event.loaded, total: event.total || body.size });
    call.onload = () => {
      if (call.status < 300) return resolve(call.responseText);
      if (call.status === 401) signOutBecause("Your key is not valid any more.");
      reject(new ApiError(call.status, messageOf(call.responseText, call.status)));
    };
    call.onerror = () => reject(new ApiError(0, "the connection was lost before the upload ended"));
    call.onabort = () => reject(new ApiError(0, "cancelled"));
    abort.addEventListener("abort", () => call.abort());
    call.send(body);
  });
}
