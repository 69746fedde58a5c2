import { Field } from "../fields";
import { useKept } from "../loaded";
import { textOf } from "../ui";
import { AskForm } from "./ask_form";
import { elements, exampleOf } from "./example";
import type { FormProps } from "./kinds";

export function JsonForm({ metadata, kept, busy, send }: FormProps) {
  const example = exampleOf(metadata);
  // An input that is too large to be written out has no data: then there is nothing to begin with.
  const whole = example.inputs.every((one) => one.data.length === elements(one.shape));
  const [text, setText] = useKept(kept, whole ? JSON.stringify(example, null, 1).replace(/\n\s+(?=[^\n{}]*[\],\n])(?!")/g, " ") : "");
  const ask = () => {
    try {
      JSON.parse(text);
    } catch (failure) {
      throw new Error(`This is no JSON: ${textOf(failure)}`);
    }
    return { text };
  };
  return (
    <AskForm ask={ask} send={send} disabled={busy || !text.trim()}>
      <Field title="Request of the Open Inference Protocol (v2)" lines={14} value={text} onText={setText} />
    </AskForm>
  );
}
