// Encoded files, for the inputs that the server prepares itself: they are sent as they are.
import { useState } from "preact/hooks";
import { Drop } from "../fields";
import { useDraft } from "../loaded";
import { Button, ErrorLine } from "../ui";
import { AskForm } from "./ask_form";
import type { FormProps } from "./kinds";

const FILE_BYTES_MAX = 16 * 2 ** 20;

function addressOf(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

export function EncodedForm({ metadata, kept, busy, send }: FormProps) {
  const usage = metadata.parameters?.usage;
  const names = Object.values(usage?.encoded ?? {});
  const kind = usage?.kind === "audio" ? "audio" : "image";
  const [files, keep] = useDraft<Record<string, string>>(kept, {});
  const [error, setError] = useState<unknown>(null);
  const take = async (name: string, file: File) => {
    try {
      if (file.size > FILE_BYTES_MAX) throw new Error(`${file.name} is larger than 16 MiB: send it with \`millstream predict ${metadata.name} --input ${file.name}\`.`);
      keep({ [name]: await addressOf(file) });
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  const given = names.filter((name) => files[name]);
  const ask = () => ({ inputs: given.map((name) => ({ name, datatype: "BYTES", shape: [1], data: [files[name] ?? ""] })) });
  return (
    <AskForm ask={ask} send={send} disabled={busy || !given.length}>
      {names.map((name) => (
        <div key={name}>
          <Drop label={`File of ${name}`} accept={`${kind}/*`} pasted={kind === "image" && names.length === 1} onFile={(file) => void take(name, file)}>
            {kind === "image" ? `Drop the image for ${name} here, paste one, or choose a file.` : `Drop the recording for ${name} here, or choose a file.`}
          </Drop>
          {files[name] && <p>{kind === "image" ? <img class="picture" src={files[name]} alt={`what will be sent as ${name}`} /> : <audio controls src={files[name]} aria-label={`what will be sent as ${name}`} />} <Button onClick={() => keep({ [name]: "" })}>Remove</Button></p>}
        </div>
      ))}
      <ErrorLine error={error} />
    </AskForm>
  );
}
