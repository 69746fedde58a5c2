import { Check, Field } from "../fields";
import { useKept } from "../loaded";
import { AskForm } from "./ask_form";
import type { FormProps } from "./kinds";

export function TextForm({ metadata, kept, busy, send }: FormProps) {
  const usage = metadata.parameters?.usage;
  const [text, setText] = useKept(kept, String(usage?.example?.inputs[0]?.data[0] ?? "Some text."));
  const [lines, setLines] = useKept(`${kept} lines`);
  const name = usage?.input ?? metadata.inputs[0]?.name ?? "text";
  const column = metadata.inputs.find((spec) => spec.name === name)?.shape.length === 2;
  const ask = () => {
    const data = lines ? text.split("\n").filter((line) => line.trim()) : [text];
    return { inputs: [{ name, datatype: "BYTES", shape: column ? [data.length, 1] : [data.length], data }] };
  };
  return (
    <AskForm ask={ask} send={send} disabled={busy || !text.trim()}>
      <Field title="Text" lines={6} value={text} onText={setText} />
      <Check title="Each line is a text of its own" checked={!!lines} onCheck={(checked) => setLines(checked ? "1" : "")} />
    </AskForm>
  );
}
