import { useState } from "preact/hooks";
import { Button, ErrorLine, useKept } from "../ui";
import { elements, exampleOf } from "./example";
import type { FormProps } from "./kinds";

export function JsonForm({ metadata, kept, busy, send }: FormProps) {
  const example = exampleOf(metadata);
  // An input that is too large to be written out has no data: then there is nothing to begin with.
  const whole = example.inputs.every((one) => one.data.length === elements(one.shape));
  const [text, setText] = useKept(kept, whole ? JSON.stringify(example, null, 1).replace(/\n\s+(?=[^\n{}]*[\],\n])(?!")/g, " ") : "");
  const [error, setError] = useState<unknown>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    setError(null);
    try {
      JSON.parse(text);
    } catch (failure) {
      return setError(new Error(`This is no JSON: ${failure instanceof Error ? failure.message : ""}`));
    }
    send({ text });
  };
  return (
    <form onSubmit={submit}>
      <label for="json">Request of the Open Inference Protocol (v2)</label>
      <textarea id="json" rows={14} spellcheck={false} value={text} onInput={(event) => setText(event.currentTarget.value)} />
      <ErrorLine error={error} />
      <div class="actions"><Button type="submit" kind="main" disabled={busy || !text.trim()}>Send</Button></div>
    </form>
  );
}
