// The kinds of forms with which a model is tried. Others join the list with a form, and a view of the answer if it needs its own.
import type { ComponentType } from "preact";
import type { Metadata } from "../documents";
import type { Answer, Ask } from "./call";
import { EncodedForm } from "./encoded";
import { ImageForm } from "./image";
import { JsonForm } from "./json";
import { NumbersForm } from "./numbers";
import { TableForm } from "./table";
import { TextForm } from "./text";

export interface FormProps {
  metadata: Metadata;
  /** Prefix of the names under which the form keeps what was written. */
  kept: string;
  busy: boolean;
  send: (ask: Ask) => void;
}

export interface FormKind {
  name: string;
  title: string;
  fits: (metadata: Metadata) => boolean;
  Form: ComponentType<FormProps>;
  /** Shown in place of the usual view of an answer. */
  View?: ComponentType<{ metadata: Metadata; answer: Answer }>;
}

function usageIs(kind: string) {
  return (metadata: Metadata) => metadata.parameters?.usage?.kind === kind;
}

/** The first one that fits is opened first. */
export const KINDS: FormKind[] = [
  { name: "text", title: "Text", fits: usageIs("text"), Form: TextForm },
  { name: "encoded", title: "File", fits: (metadata) => Object.keys(metadata.parameters?.usage?.encoded ?? {}).length > 0, Form: EncodedForm },
  { name: "image", title: "Image", fits: (metadata) => !!metadata.parameters?.usage?.image, Form: ImageForm },
  { name: "table", title: "Table", fits: usageIs("columns"), Form: TableForm },
  { name: "numbers", title: "Tensors", fits: (metadata) => metadata.inputs.length > 0, Form: NumbersForm },
  { name: "json", title: "Request as JSON", fits: () => true, Form: JsonForm },
];
