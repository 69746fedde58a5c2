// Tensors: a shape and values for each input, written or filled.
import { shapeText, type Metadata, type Tensor } from "../documents";
import { Field as Input } from "../fields";
import { useDraft } from "../loaded";
import { AskForm } from "./ask_form";
import type { TensorValue } from "./call";
import { elements, exampleOf, values, type Value } from "./example";
import type { FormProps } from "./kinds";

const FILLS = [["written", "as written"], ["random", "random"], ["0", "all 0"], ["1", "all 1"]] as const;

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
  const [fields, keep, forget, changed] = useDraft(kept, firstOf(metadata));
  // An input without a field may be left out.
  const set = (name: string, change: Partial<Field>) => keep({ [name]: { fill: "random", shape: "1", text: "", ...fields[name], ...change } });
  const ask = () => {
    const used = metadata.inputs.filter((spec) => fields[spec.name] && fields[spec.name]?.fill !== "none");
    return { inputs: used.map((spec, at) => tensorOf(spec, fields[spec.name] as Field, at + 1)) };
  };
  return (
    <AskForm ask={ask} send={send} disabled={busy} reset={changed && forget}>
      {metadata.inputs.map((spec) => {
        const field = fields[spec.name] ?? { fill: "none", shape: "", text: "" };
        return (
          <fieldset key={spec.name}>
            <legend>{spec.name}</legend>
            <p class="hint">{spec.datatype} {shapeText(spec.shape)}</p>
            <div class="filters">
              <Input title="Values" value={field.fill} options={spec.optional ? [["none", "left out"], ...FILLS] : FILLS} onText={(fill) => set(spec.name, { fill })} />
              {field.fill !== "none" && <Input title="Shape" value={field.shape} size={16} inputMode="numeric" onText={(shape) => set(spec.name, { shape })} />}
            </div>
            {field.fill === "written" && <Input title="Values as JSON, flat or nested" lines={5} value={field.text} onText={(text) => set(spec.name, { text })} />}
          </fieldset>
        );
      })}
    </AskForm>
  );
}
