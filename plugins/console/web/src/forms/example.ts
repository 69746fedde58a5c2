// A request that a model answers: the one that the server knows, or one of small numbers made from its signature.
import type { Metadata, RequestDocument, Tensor } from "../documents";

/** Elements of an input that is written out; a larger one is filled by the page. */
export const WRITTEN_MAX = 1000;
/** The size that takes the place of one that may vary. */
const VARIABLE = 8;

/** The shape of one row: -1 in front is one row, elsewhere a small size. */
export function smallShape(spec: Tensor): number[] {
  return spec.shape.map((size, at) => (size < 0 ? (at ? VARIABLE : 1) : size));
}

export function elements(shape: number[]): number {
  return shape.reduce((product, size) => product * size, 1);
}

/** Datatypes that JSON has no form of. */
export const BINARY_ONLY = new Set(["FP16", "BF16"]);

export type Value = number | string | boolean;

/** `count` values of a datatype, the same each time for the same `seed`. */
export function values(datatype: string, total: number, seed = 1): Value[] {
  let state = seed;
  const random = () => {
    state = (state * 16_807) % 2_147_483_647;
    return state / 2_147_483_647;
  };
  return Array.from({ length: total }, () => {
    const drawn = random();
    if (datatype === "BYTES") return "text";
    if (datatype === "BOOL") return drawn > 0.5;
    return /^(FP|BF)/.test(datatype) ? Math.round(drawn * 1000) / 1000 : Math.floor(drawn * 10);
  });
}

/** Inputs of the example that are too large to be written out have no data. */
export function exampleOf(metadata: Metadata): RequestDocument {
  const known = metadata.parameters?.usage?.example;
  if (known) return known;
  const inputs = metadata.inputs.filter((spec) => !spec.optional);
  return {
    inputs: inputs.map((spec) => {
      const shape = smallShape(spec);
      const total = elements(shape);
      const written = total <= WRITTEN_MAX && !BINARY_ONLY.has(spec.datatype);
      return { name: spec.name, datatype: spec.datatype, shape, data: written ? values(spec.datatype, total) : [] };
    }),
  };
}
