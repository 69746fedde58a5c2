// The documents of the admin API about models, as far as pages show them, and their words.
export interface Tensor {
  name: string;
  datatype: string;
  shape: number[];
  on_request?: boolean;
  optional?: boolean;
}
export interface ImageInput {
  layout: "channels_first" | "channels_last";
  channels: number;
  height: number;
  width: number;
}
export interface RequestDocument {
  inputs: { name: string; datatype: string; shape: number[]; data: unknown[] }[];
  parameters?: Record<string, unknown>;
  outputs?: unknown[];
}
export interface Usage {
  kind: string;
  input: string | null;
  columns: string[];
  image: ImageInput | null;
  /** Inputs that the server makes of encoded files -> the names that the files are sent as. */
  encoded?: Record<string, string>;
  sentence: string;
  example: RequestDocument | null;
}
export interface Instance {
  worker: string;
  state: string;
  reason: string | null;
  profile: Record<string, number>;
  size_bytes: number;
  variant: string | null;
}
export interface Variant {
  name: string;
  target: string;
  runtime: string;
  device: string;
  seconds: number;
  size_bytes: number;
  refused: string | null;
}
export interface RaceSummary {
  kind: string;
  state: string;
  winner: string | null;
  ratio: number;
  serving: boolean;
  undone: string | null;
}
/** What gateways measured of a step; seconds of steps that were answered. */
export interface StepMeasured {
  answered: number;
  skipped: number;
  withdrawn: number;
  failed: Record<string, number>;
  p50_s: number | null;
  p99_s: number | null;
  queue_s: number | null;
  run_s: number | null;
}
export interface Step {
  step: string;
  model: string;
  version: number;
  measured: StepMeasured | null;
}
/** A graph as docs/graphs.md describes it. A source is "step.output", or an input of the graph. */
export interface GraphDocument {
  inputs?: Record<string, unknown>;
  steps: Record<string, { model: string; inputs?: Record<string, string[]>; if?: string }>;
  outputs?: Record<string, string[]>;
}
export interface FunctionDocument {
  file: string;
  python: string;
  packages: string[] | null;
  may: string[];
}
export interface Version {
  model: string;
  version: number | null;
  state: string;
  reason: string | null;
  digest: string | null;
  size_bytes: number | null;
  created: number | null;
  pools: string[];
  active: boolean;
  batching: boolean | null;
  batching_decided: "proven" | "requested" | "unmerged" | "off" | null;
  batching_reason: string | null;
  rows_max: number | null;
  inputs: Tensor[];
  outputs: Tensor[];
  usage: Usage | null;
  errors: { worker: string; at: number; text: string; count: number }[];
  steps: Step[];
  graph: GraphDocument | null;
  function: FunctionDocument | null;
  load_failures: { kind: string; reason: string; failed_at: number }[];
  notes: string[];
  imported: { importer: string; producer: string; rows: number; output: string; difference: number } | null;
  instances: Instance[];
  variants: Variant[];
  races: RaceSummary[];
}
export interface Model {
  name: string;
  active: number | null;
  serving: number | null;
  source: string | null;
  reason: string | null;
  unloaded: boolean;
  owner: string;
  labels: Record<string, string>;
  versions: Version[];
}
/** What GET /v2/models/NAME says: all that a key which may only call a model needs. */
export interface Metadata {
  name: string;
  versions: string[];
  platform: string;
  inputs: Tensor[];
  outputs: Tensor[];
  parameters?: { usage?: Usage };
}

export type Tone = "good" | "bad" | "warn" | "plain";

const STATES: Record<string, [Tone, string]> = {
  receiving: ["warn", "being uploaded"],
  pending: ["warn", "waiting"],
  checking: ["warn", "being checked"],
  standby: ["plain", "on standby"],
  loading: ["warn", "loading"],
  warming: ["warn", "warming up"],
  ready: ["good", "ready"],
  draining: ["warn", "draining"],
  failed: ["bad", "failed"],
  unloaded: ["plain", "unloaded"],
};

export function stateWords(state: string): [Tone, string] {
  return STATES[state] ?? ["plain", state];
}

/** What the state of a version means for callers. */
export const MEANING: Record<string, string> = {
  receiving: "Its file is being sent.",
  pending: "It waits for its check, or for a worker that loads it.",
  checking: "The server runs it in a sandbox to learn whether and how it works.",
  standby: "No worker holds it now; the first call makes one load it.",
  loading: "A worker loads it.",
  warming: "A worker makes its first runs.",
  ready: "It answers.",
  draining: "Its last calls are answered, then it is unloaded.",
  failed: "It cannot be served.",
  unloaded: "It does not answer until it is loaded.",
};

/** The state of a model: that of the version which answers, or of the newest. */
export function modelState(model: Model): string {
  if (model.unloaded) return "unloaded";
  const shown = model.versions.find((one) => one.version === model.serving) ?? model.versions.at(-1);
  return shown?.state ?? "pending";
}

export function shapeText(shape: number[]): string {
  return shape.length ? `[${shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]` : "one value";
}

export function tensorText(spec: Tensor): string {
  const more = [spec.optional && "may be left out", spec.on_request && "only if asked for"].filter(Boolean).join(", ");
  return `${spec.name}: ${spec.datatype} ${shapeText(spec.shape)}${more ? ` (${more})` : ""}`;
}

const DECIDED: Record<string, string> = {
  proven: "the check has proven that rows do not influence each other",
  requested: "its configuration asks for it; rows were not proven independent",
  unmerged: "requests with rows run alone",
  off: "it is off",
};

export function batchingText(version: Version): string {
  const why = [DECIDED[version.batching_decided ?? ""], version.batching_reason].filter(Boolean).join(": ");
  const how = version.batching ? `Requests share runs of up to ${version.rows_max} rows` : "Each request runs alone";
  return why ? `${how}, since ${why}.` : `${how}.`;
}

export function labelsText(labels: Record<string, string>): string {
  return Object.entries(labels).map(([name, value]) => `${name}=${value}`).join(", ");
}

/** The name of a worker on its machine, of its id. Workers of several machines may share one. */
export function workerName(id: string): string {
  return id.replace(/-[^-]*$/, "");
}

/** The version that a roll back activates: the newest published one below the active one that has not failed. */
export function before(model: Model): number | null {
  const now = model.active ?? model.serving;
  const older = model.versions.filter((one) => one.version !== null && one.digest && one.state !== "failed" && now !== null && one.version < now);
  return older.at(-1)?.version ?? null;
}
