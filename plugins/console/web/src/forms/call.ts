// One call of a model over the Open Inference Protocol: as JSON, or with binary tensors where JSON would be long or has no form.
import { request } from "../api";
import type { Metadata } from "../documents";
import { BINARY_ONLY, elements, type Value } from "./example";

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

const JSON_ELEMENTS_MAX = 20_000;

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

function whole(bits: number): number {
  const exponent = (bits >>> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

type Field = [size: number, put: (view: DataView, at: number, value: number) => void, take: (view: DataView, at: number) => number];

const FIELDS: Record<string, Field> = {
  BOOL: [1, (view, at, value) => view.setUint8(at, value ? 1 : 0), (view, at) => view.getUint8(at)],
  INT8: [1, (view, at, value) => view.setInt8(at, value), (view, at) => view.getInt8(at)],
  UINT8: [1, (view, at, value) => view.setUint8(at, value), (view, at) => view.getUint8(at)],
  INT16: [2, (view, at, value) => view.setInt16(at, value, true), (view, at) => view.getInt16(at, true)],
  UINT16: [2, (view, at, value) => view.setUint16(at, value, true), (view, at) => view.getUint16(at, true)],
  INT32: [4, (view, at, value) => view.setInt32(at, value, true), (view, at) => view.getInt32(at, true)],
  UINT32: [4, (view, at, value) => view.setUint32(at, value, true), (view, at) => view.getUint32(at, true)],
  INT64: [8, (view, at, value) => view.setBigInt64(at, BigInt(value), true), (view, at) => Number(view.getBigInt64(at, true))],
  UINT64: [8, (view, at, value) => view.setBigUint64(at, BigInt(value), true), (view, at) => Number(view.getBigUint64(at, true))],
  FP16: [2, (view, at, value) => view.setUint16(at, half(value), true), (view, at) => whole(view.getUint16(at, true))],
  BF16: [
    2,
    (view, at, value) => {
      const scratch = new DataView(new ArrayBuffer(4));
      scratch.setFloat32(0, value);
      view.setUint16(at, scratch.getUint16(0), true);
    },
    (view, at) => {
      const scratch = new DataView(new ArrayBuffer(4));
      scratch.setUint16(0, view.getUint16(at, true));
      return scratch.getFloat32(0);
    },
  ],
  FP32: [4, (view, at, value) => view.setFloat32(at, value, true), (view, at) => view.getFloat32(at, true)],
  FP64: [8, (view, at, value) => view.setFloat64(at, value, true), (view, at) => view.getFloat64(at, true)],
};

function encode(tensor: TensorValue): Uint8Array {
  if (tensor.datatype === "BYTES") {
    const texts = Array.from(tensor.data, (one) => new TextEncoder().encode(String(one)));
    const out = new Uint8Array(texts.reduce((total, one) => total + 4 + one.length, 0));
    let at = 0;
    for (const one of texts) {
      new DataView(out.buffer).setUint32(at, one.length, true);
      out.set(one, at + 4);
      at += 4 + one.length;
    }
    return out;
  }
  const field = FIELDS[tensor.datatype];
  if (!field) throw new Error(`this page cannot send the datatype ${tensor.datatype}`);
  const view = new DataView(new ArrayBuffer(field[0] * tensor.data.length));
  tensor.data.forEach((value, at) => field[1](view, at * field[0], Number(value)));
  return new Uint8Array(view.buffer);
}

function decode(datatype: string, raw: Uint8Array): Value[] {
  const view = new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  if (datatype === "BYTES") {
    const found: string[] = [];
    for (let at = 0; at + 4 <= raw.length; ) {
      const size = view.getUint32(at, true);
      found.push(new TextDecoder().decode(raw.subarray(at + 4, at + 4 + size)));
      at += 4 + size;
    }
    return found;
  }
  const field = FIELDS[datatype];
  if (!field) return [];
  return Array.from({ length: raw.length / field[0] }, (_, at) => (datatype === "BOOL" ? field[2](view, at) === 1 : field[2](view, at * field[0])));
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
  const binaryReply = metadata.outputs.some((one) => BINARY_ONLY.has(one.datatype));
  const outputs = wanted.classes
    ? metadata.outputs.filter((one) => !one.on_request).map((one) => ({ name: one.name, ...(isScored(one) && { parameters: { classification: wanted.classes } }) }))
    : undefined;
  const rest = { ...(outputs && { outputs }), ...(binaryReply && { parameters: { binary_data_output: true } }) };
  const binary = ask.inputs.some((one) => BINARY_ONLY.has(one.datatype)) || ask.inputs.some((one) => elements(one.shape) > JSON_ELEMENTS_MAX);
  if (!binary) {
    const inputs = ask.inputs.map((one) => ({ ...one, data: Array.from<Value>(one.data) }));
    return { body: JSON.stringify({ inputs, ...rest }), headers: { "Content-Type": "application/json" } };
  }
  const raw = ask.inputs.map(encode);
  const inputs = ask.inputs.map(({ data: _, ...one }, at) => ({ ...one, parameters: { binary_data_size: raw[at]?.length ?? 0 } }));
  const head = new TextEncoder().encode(JSON.stringify({ inputs, ...rest }));
  return { body: new Blob([head, ...raw] as BlobPart[]), headers: { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) } };
}

/** Source: W3C, "Server Timing": `lane;dur=0.2, queue;dur=1.1`, in milliseconds. */
function partsOf(header: string | null): Answer["parts"] {
  return [...(header ?? "").matchAll(/([\w-]+);dur=([\d.]+)/g)].map((found) => ({ name: found[1] ?? "", seconds: Number(found[2]) / 1000 }));
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
  const whole_ = new Uint8Array(await reply.arrayBuffer());
  const taken = (performance.now() - began) / 1000;
  const headSize = Number(reply.headers.get("Inference-Header-Content-Length") ?? whole_.length);
  const text = new TextDecoder().decode(whole_.subarray(0, headSize));
  const document = JSON.parse(text) as Reply;
  let at = headSize;
  for (const one of document.outputs ?? []) {
    const size = one.parameters?.binary_data_size;
    if (size === undefined) continue;
    one.data = decode(one.datatype, whole_.subarray(at, at + size));
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
    text: headSize === whole_.length ? text : JSON.stringify(document),
    version: document.model_version ?? "",
    seconds: taken,
    parts: partsOf(reply.headers.get("Server-Timing")),
  };
}
