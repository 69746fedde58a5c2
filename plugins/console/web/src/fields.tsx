// Fields of forms and filters, each with its title and hint, and a place for a file.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useState } from "preact/hooks";

interface FieldProps extends Omit<JSX.InputHTMLAttributes<HTMLInputElement>, "title" | "onInput" | "onChange" | "value"> {
  title: string;
  value: string;
  onText: (text: string) => void;
  hint?: ComponentChildren;
  /** Lines of a field for long text. */
  lines?: number;
  /** Values and their words, of which one is chosen. */
  options?: readonly (readonly [string, string])[];
  /** Tells of a text when it is complete, not of each key. */
  late?: boolean;
  /** What a pattern asks for, which browsers show. */
  says?: string;
}

export function Field(props: FieldProps) {
  const { title, value, onText, hint, lines, options, late, says, ...rest } = props;
  const id = useId();
  const [typed, setTyped] = useState(value);
  useEffect(() => setTyped(value), [value]);
  const tell = (to: (text: string) => void) => (event: Event) => to((event.currentTarget as HTMLInputElement).value);
  // What is not told yet is kept here, or the page would put back what it knows when it is drawn again.
  const told = late ? { value: typed, onInput: tell(setTyped), onChange: tell(onText) } : { value, onInput: tell(onText) };
  const shared = { ...rest, ...told, id, spellcheck: false, title: says, "aria-describedby": hint ? `${id}-hint` : undefined } as object;
  return (
    <div class="field">
      <label for={id}>{title}</label>
      {options ? (
        <select {...shared}>{options.map(([one, words]) => <option key={one} value={one}>{words}</option>)}</select>
      ) : lines ? (
        <textarea {...shared} rows={lines} />
      ) : (
        <input {...shared} />
      )}
      {hint && <p class="hint" id={`${id}-hint`}>{hint}</p>}
    </div>
  );
}

export function Check(props: { title: string; checked: boolean; onCheck: (checked: boolean) => void; disabled?: boolean }) {
  return (
    <label class="line">
      <input type="checkbox" checked={props.checked} disabled={props.disabled} onChange={(event) => props.onCheck(event.currentTarget.checked)} />
      {props.title}
    </label>
  );
}

/** A place for a file: dropped or chosen, and where `pasted` also an image of the clipboard. */
export function Drop(props: { label: string; accept?: string; pasted?: boolean; onFile: (file: File) => void; children?: ComponentChildren }) {
  const [over, setOver] = useState(false);
  useEffect(() => {
    if (!props.pasted) return;
    const paste = (event: ClipboardEvent) => {
      const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
      if (!file) return;
      event.preventDefault();
      props.onFile(file);
    };
    addEventListener("paste", paste);
    return () => removeEventListener("paste", paste);
  });
  const take = (files: FileList | null | undefined) => files?.[0] && props.onFile(files[0]);
  return (
    <div
      class={over ? "drop over" : "drop"}
      onDragOver={(event) => (event.preventDefault(), setOver(true))}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        take(event.dataTransfer?.files);
      }}
    >
      {props.children}
      <div class="button">
        Choose a file
        <input type="file" aria-label={props.label} accept={props.accept} onChange={(event) => {
          take(event.currentTarget.files);
          event.currentTarget.value = "";
        }} />
      </div>
    </div>
  );
}
