import { Button, useKept } from "../ui";
import type { FormProps } from "./kinds";

export function TextForm({ metadata, kept, busy, send }: FormProps) {
  const usage = metadata.parameters?.usage;
  const [text, setText] = useKept(kept, String(usage?.example?.inputs[0]?.data[0] ?? "Some text."));
  const [lines, setLines] = useKept(`${kept} lines`);
  const name = usage?.input ?? metadata.inputs[0]?.name ?? "text";
  const column = metadata.inputs.find((spec) => spec.name === name)?.shape.length === 2;
  const submit = (event: Event) => {
    event.preventDefault();
    const data = lines ? text.split("\n").filter((line) => line.trim()) : [text];
    send({ inputs: [{ name, datatype: "BYTES", shape: column ? [data.length, 1] : [data.length], data }] });
  };
  return (
    <form onSubmit={submit}>
      <label for="text">Text</label>
      <textarea id="text" value={text} onInput={(event) => setText(event.currentTarget.value)} />
      <label class="line">
        <input type="checkbox" checked={!!lines} onChange={(event) => setLines(event.currentTarget.checked ? "1" : "")} />
        Each line is a text of its own
      </label>
      <div class="actions"><Button type="submit" kind="main" disabled={busy || !text.trim()}>Send</Button></div>
    </form>
  );
}
