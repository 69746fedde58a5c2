// One call of a model over the Open Inference Protocol: as JSON, with binary tensors for datatypes that JSON has no form of.
import { request } from "../api";
import type { Metadata } from "../documents";
import { BINARY_ONLY, type Value } from "./example";

export interface TensorValue {
  name: string;
  datatype: string;
  shape: number[];
  data: Value[] | Float32Array | Uint8Array;
}
/** What a form sends: tensors, or the text of a request as it is written. */
export type Ask = { inputs: TensorValue[] } | { text: string };

export interface Output {
  name: string;
  datatype: string;
  shape: number[];
  data: Value[];
  /** Whether its elements are classes: "score:index" or "score:index:label". */
  classes: boolean;
}
export interface Answer {
  outputs: Output[];
  /** The whole answer, as JSON. */
  text: string;
  version: string;
  seconds: number;
  /** Parts of the time in seconds, of the header Server-Timing. */
  parts: { name: string; seconds: number }[];
}

function half(value: number): number {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  const bits = view.getUint32(0);
  const sign = (bits >>> 16) & 0x8000;
  const exponent = ((bits >>> 23) & 0xff) - 112;
  if (exponent >= 31) return sign | 0x7c00 | (Number.isNaN(value) ? 0x200 : 0);
  if (exponent <= 0) return exponent < -10 ? sign : sign | (((bits & 0x7fffff) | 0x800000) >>> (14 - exponent));
  return (sign | (exponent << 10) | ((bits & 0x7fffff) >>> 13)) + ((bits >>> 12) & 1);
}

function ofHalf(bits: number): number {
  const exponent = (bits >>> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

/** The bytes of an FP16 or BF16 tensor; BF16 is the upper half of a float32. */
function encode(tensor: TensorValue): Uint8Array {
  const view = new DataView(new ArrayBuffer(2 * tensor.data.length));
  const upper = (value: number) => new Uint32Array(new Float32Array([value]).buffer)[0]! >>> 16;
  tensor.data.forEach((value, at) => view.setUint16(2 * at, tensor.datatype === "FP16" ? half(Number(value)) : upper(Number(value)), true));
  return new Uint8Array(view.buffer);
}

function decode(datatype: string, raw: Uint8Array): number[] {
  const view = new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  const ofUpper = (bits: number) => new Float32Array(new Uint32Array([bits << 16]).buffer)[0] ?? 0;
  return Array.from({ length: raw.length / 2 }, (_, at) => (datatype === "FP16" ? ofHalf : ofUpper)(view.getUint16(2 * at, true)));
}

interface Wanted {
  /** Number of best classes to answer instead of all values of an output; 0: all values. */
  classes: number;
}

/** Outputs with a score for each of several classes. */
export function scored(metadata: Metadata): boolean {
  return metadata.outputs.some(isScored);
}

function isScored(spec: { datatype: string; shape: number[] }): boolean {
  return spec.datatype.startsWith("FP") && spec.shape.length === 2 && Math.abs(spec.shape[1] ?? 0) !== 1;
}

function bodyOf(ask: { inputs: TensorValue[] }, metadata: Metadata, wanted: Wanted): { body: BodyInit; headers: Record<string, string> } {
  const raw: Uint8Array[] = [];
  const inputs = ask.inputs.map(({ data, ...one }) => {
    if (!BINARY_ONLY.has(one.datatype)) return { ...one, data: Array.from<Value>(data) };
    const encoded = encode({ ...one, data });
    raw.push(encoded);
    return { ...one, parameters: { binary_data_size: encoded.length } };
  });
  const outputs = metadata.outputs.filter((one) => !one.on_request).map((one) => {
    if (BINARY_ONLY.has(one.datatype)) return { name: one.name, parameters: { binary_data: true } };
    return wanted.classes && isScored(one) ? { name: one.name, parameters: { classification: wanted.classes } } : { name: one.name };
  });
  const text = JSON.stringify({ inputs, outputs });
  if (!raw.length) return { body: text, headers: { "Content-Type": "application/json" } };
  const head = new TextEncoder().encode(text);
  return { body: new Blob([head, ...raw] as BlobPart[]), headers: { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) } };
}

/** Source: W3C, "Server Timing": `lane;dur=0.2, queue;dur=1.1`, in milliseconds. */
function partsOf(header: string | null): Answer["parts"] {
  return [...(header ?? "").matchAll(/([\w.-]+);dur=([\d.]+)/g)].map((found) => ({ name: found[1] ?? "", seconds: Number(found[2]) / 1000 }));
}

interface Reply {
  model_version?: string;
  outputs?: { name: string; datatype: string; shape: number[]; data?: unknown[]; parameters?: { binary_data_size?: number } }[];
}

/** Calls the model and reads its answer. Throws ApiError, or Error for what this page cannot send. */
export async function call(metadata: Metadata, ask: Ask, wanted: Wanted, abort: AbortSignal): Promise<Answer> {
  const sent = "text" in ask ? { body: ask.text, headers: { "Content-Type": "application/json" } } : bodyOf(ask, metadata, wanted);
  const began = performance.now();
  const reply = await request(`call/v2/models/${encodeURIComponent(metadata.name)}/infer`, { method: "POST", ...sent, signal: abort });
  const received = new Uint8Array(await reply.arrayBuffer());
  const taken = (performance.now() - began) / 1000;
  const headSize = Number(reply.headers.get("Inference-Header-Content-Length") ?? received.length);
  const text = new TextDecoder().decode(received.subarray(0, headSize));
  const document = JSON.parse(text) as Reply;
  let at = headSize;
  for (const one of document.outputs ?? []) {
    const size = one.parameters?.binary_data_size;
    if (size === undefined) continue;
    one.data = decode(one.datatype, received.subarray(at, at + size));
    delete one.parameters;
    at += size;
  }
  return {
    outputs: (document.outputs ?? []).map((one) => ({
      name: one.name,
      datatype: one.datatype,
      shape: one.shape,
      data: (one.data ?? []).flat(Infinity) as Value[],
      classes: wanted.classes > 0 && one.datatype === "BYTES" && metadata.outputs.some((spec) => spec.name === one.name && isScored(spec)),
    })),
    text: headSize === received.length ? text : JSON.stringify(document),
    version: document.model_version ?? "",
    seconds: taken,
    parts: partsOf(reply.headers.get("Server-Timing")),
  };
}
