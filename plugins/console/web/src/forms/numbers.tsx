// Tensors: a shape and values for each input, written or filled.
import { useState } from "preact/hooks";
import type { Metadata, Tensor } from "../documents";
import { shapeText } from "../documents";
import { Button, ErrorLine, useKept } from "../ui";
import type { TensorValue } from "./call";
import { elements, exampleOf, values, type Value } from "./example";
import type { FormProps } from "./kinds";

interface Field {
  /** Whether the values are written, or made: zeros, ones, random. */
  fill: string;
  shape: string;
  text: string;
}

const ELEMENTS_MAX = 20_000_000;

function firstOf(metadata: Metadata): Record<string, Field> {
  const fields: Record<string, Field> = {};
  for (const one of exampleOf(metadata).inputs) {
    const written = one.data.length === elements(one.shape);
    fields[one.name] = { fill: written ? "written" : "random", shape: one.shape.join(", "), text: written ? JSON.stringify(one.data) : "" };
  }
  return fields;
}

function shapeOf(text: string, spec: Tensor): number[] {
  const shape = text.split(/[\s,x×]+/).filter(Boolean).map(Number);
  if (shape.some((size) => !Number.isInteger(size) || size < 0)) throw new Error(`${spec.name}: a shape is whole numbers, like 1, 3, 224, 224`);
  if (elements(shape) > ELEMENTS_MAX) throw new Error(`${spec.name}: ${elements(shape).toLocaleString("en")} values are too many for this page`);
  return shape;
}

/** The shape that the nesting of a list shows. */
function nested(value: unknown): number[] {
  return Array.isArray(value) ? [value.length, ...nested(value[0])] : [];
}

function tensorOf(spec: Tensor, field: Field, seed: number): TensorValue {
  const given = shapeOf(field.shape, spec);
  const { name, datatype } = spec;
  if (field.fill === "random") return { name, datatype, shape: given, data: values(datatype, elements(given), seed) };
  if (field.fill !== "written") {
    const one: Value = datatype === "BYTES" ? field.fill : datatype === "BOOL" ? field.fill === "1" : Number(field.fill);
    return { name, datatype, shape: given, data: new Array<Value>(elements(given)).fill(one) };
  }
  let parsed: unknown;
  try {
    parsed = JSON.parse(field.text.trim().startsWith("[") ? field.text : `[${field.text}]`);
  } catch {
    throw new Error(`${name}: the values are no JSON list, like [0.5, 1]`);
  }
  const flat = (parsed as unknown[]).flat(Infinity) as Value[];
  const shape = nested(parsed).length > 1 ? nested(parsed) : given;
  if (flat.length !== elements(shape)) {
    throw new Error(`${name}: there are ${flat.length} values, and the shape [${shape.join(", ")}] has ${elements(shape)}`);
  }
  return { name, datatype, shape, data: flat };
}

export function NumbersForm({ metadata, kept, busy, send }: FormProps) {
  const [text, keep] = useKept(kept);
  const [error, setError] = useState<unknown>(null);
  const fields = text ? (JSON.parse(text) as Record<string, Field>) : firstOf(metadata);
  // An input without a field may be left out.
  const set = (name: string, change: Partial<Field>) => {
    const before = fields[name] ?? { fill: "random", shape: "1", text: "" };
    keep(JSON.stringify({ ...fields, [name]: { ...before, ...change } }));
  };
  const submit = (event: Event) => {
    event.preventDefault();
    setError(null);
    try {
      const used = metadata.inputs.filter((spec) => fields[spec.name] && fields[spec.name]?.fill !== "none");
      send({ inputs: used.map((spec, at) => tensorOf(spec, fields[spec.name] as Field, at + 1)) });
    } catch (failure) {
      setError(failure);
    }
  };
  return (
    <form onSubmit={submit}>
      {metadata.inputs.map((spec, at) => {
        const field = fields[spec.name] ?? { fill: "none", shape: "", text: "" };
        return (
          <fieldset key={spec.name}>
            <legend>{spec.name}</legend>
            <p class="hint">{spec.datatype} {shapeText(spec.shape)}</p>
            <div class="filters">
              <label class="line">
                Values
                <select value={field.fill} onChange={(event) => set(spec.name, { fill: event.currentTarget.value })}>
                  {spec.optional && <option value="none">left out</option>}
                  <option value="written">as written</option>
                  <option value="random">random</option>
                  <option value="0">all 0</option>
                  <option value="1">all 1</option>
                </select>
              </label>
              {field.fill !== "none" && (
                <label class="line">
                  Shape
                  <input value={field.shape} size={16} inputMode="numeric" onInput={(event) => set(spec.name, { shape: event.currentTarget.value })} />
                </label>
              )}
            </div>
            {field.fill === "written" && (
              <>
                <label for={`values-${at}`}>Values as JSON, flat or nested</label>
                <textarea id={`values-${at}`} spellcheck={false} value={field.text} onInput={(event) => set(spec.name, { text: event.currentTarget.value })} />
              </>
            )}
          </fieldset>
        );
      })}
      <ErrorLine error={error} />
      <div class="actions">
        <Button type="submit" kind="main" disabled={busy}>Send</Button>
        {text && <Button onClick={() => keep("")}>Back to the example</Button>}
      </div>
    </form>
  );
}
