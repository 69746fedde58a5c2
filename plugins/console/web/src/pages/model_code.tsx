// Calls of a model to copy, with the example that the server knows it answers.
import { useState } from "preact/hooks";
import { get, session } from "../api";
import type { Metadata, RequestDocument } from "../documents";
import { elements, exampleOf } from "../forms/example";
import { useLoaded } from "../loaded";
import { Card, Code, Pending, Tabs } from "../ui";

/** The address of the server, as this page is below it. */
function server(): string {
  return new URL("..", location.href.split("#")[0]).href.replace(/\/$/, "");
}

const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A value as Python writes it. JSON's strings and numbers are Python's. */
function python(value: unknown): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value as object).map(([name, of]) => `${JSON.stringify(name)}: ${python(of)}`).join(", ")}}`;
  return JSON.stringify(value);
}

const NUMPY: Record<string, string> = {
  BOOL: "bool_", INT8: "int8", INT16: "int16", INT32: "int32", INT64: "int64", UINT8: "uint8", UINT16: "uint16", UINT32: "uint32",
  UINT64: "uint64", FP16: "float16", FP32: "float32", FP64: "float64", BYTES: "object_",
};

/** Whether all inputs are written out; large ones are made in code. */
function written(request: RequestDocument): boolean {
  return request.inputs.every((one) => one.data.length === elements(one.shape));
}

type Input = RequestDocument["inputs"][number];

/** An expression for the array of an input. */
function array(one: Input): string {
  const type = NUMPY[one.datatype] ?? "float32";
  if (one.data.length !== elements(one.shape)) return `np.zeros(${python(one.shape)}, np.${type})`;
  return `np.array(${python(one.data)}, np.${type}).reshape(${python(one.shape)})`;
}

function curl(name: string, request: RequestDocument, keyed: boolean): string {
  if (!written(request)) return `# The request is too long for a command line: write it to a file.\n${curlOf(name, "@request.json", keyed)}`;
  return curlOf(name, quoted(JSON.stringify(request)), keyed);
}

function curlOf(name: string, body: string, keyed: boolean): string {
  const lines = [
    `curl -s ${quoted(`${server()}/v2/models/${name}/infer`)}`,
    ...(keyed ? [`  -H "Authorization: Bearer $MILLSTREAM_KEY"`] : []),
    `  -H 'Content-Type: application/json'`,
    `  -d ${body}`,
  ];
  return lines.join(" \\\n");
}

function client(name: string, request: RequestDocument, keyed: boolean): string {
  const key = keyed ? ', key=os.environ["MILLSTREAM_KEY"]' : "";
  const call = written(request)
    ? [`    answer = client.predict_json(${JSON.stringify(name)}, ${python(request)})`, `    print(answer["outputs"])`]
    : [`    answer = client.predict(${JSON.stringify(name)}, {${request.inputs.map((one) => `${JSON.stringify(one.name)}: ${array(one)}`).join(", ")}})`, "    print(answer)"];
  return [
    ...(keyed ? ["import os", ""] : []),
    ...(written(request) ? [] : ["import numpy as np"]),
    "from millstream import Client",
    "",
    `with Client(${JSON.stringify(server())}${key}) as client:`,
    ...call,
  ].join("\n");
}

function triton(name: string, request: RequestDocument, keyed: boolean): string {
  const at = new URL(server());
  const path = at.pathname.replace(/\/$/, "");
  return [
    ...(keyed ? ["import os", ""] : []),
    "import numpy as np",
    "import tritonclient.http as triton",
    "",
    `client = triton.InferenceServerClient(${JSON.stringify(at.host + path)}${at.protocol === "https:" ? ", ssl=True" : ""})`,
    "inputs = []",
    ...request.inputs.flatMap((one) => [
      `tensor = triton.InferInput(${JSON.stringify(one.name)}, ${python(one.shape)}, ${JSON.stringify(one.datatype)})`,
      `tensor.set_data_from_numpy(${array(one)})`,
      "inputs.append(tensor)",
    ]),
    `answer = client.infer(${JSON.stringify(name)}, inputs${keyed ? `, headers={"Authorization": "Bearer " + os.environ["MILLSTREAM_KEY"]}` : ""})`,
    "print(answer.get_response())",
  ].join("\n");
}

function openai(name: string, keyed: boolean): string {
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${server()}/v1`)}, api_key=${keyed ? 'os.environ["MILLSTREAM_KEY"]' : '"none"'})`,
    `answer = client.embeddings.create(model=${JSON.stringify(name)}, input=["Millstream serves this text."])`,
    "print(answer.data[0].embedding)",
  ].join("\n");
}

/** Whether texts go in and vectors come out, which OpenAI's clients call embeddings. */
function embeds(metadata: Metadata): boolean {
  const kind = metadata.parameters?.usage?.kind;
  return (kind === "text" || kind === "tokens") && metadata.outputs.some((one) => one.datatype.startsWith("FP") && one.shape.length >= 2 && (one.shape.at(-1) ?? 0) >= 16);
}

export function CodeTab(props: { model: string }) {
  const loaded = useLoaded((abort) => get<Metadata>(`call/v2/models/${encodeURIComponent(props.model)}`, abort), [props.model]);
  const [open, setOpen] = useState("curl");
  const { value } = loaded;
  if (!value) return <Pending of={loaded} />;
  const keyed = session.value?.keys_required ?? true;
  const request = exampleOf(value);
  const codes: [string, string, string][] = [
    ["curl", "curl", curl(value.name, request, keyed)],
    ["client", "Python", client(value.name, request, keyed)],
    ["triton", "tritonclient", triton(value.name, request, keyed)],
    ...(embeds(value) ? ([["openai", "openai", openai(value.name, keyed)]] as [string, string, string][]) : []),
  ];
  const shown = codes.find(([name]) => name === open) ?? codes[0];
  return (
    <Card title="Call it">
      <Tabs names={codes.map(([name, title]) => [name, title])} active={shown?.[0] ?? "curl"} onPick={setOpen} />
      {shown && <Code text={shown[2]} label={`call with ${shown[1]}`} />}
      {keyed && <p class="hint">MILLSTREAM_KEY is an API key that may call the model (scope infer:{value.name}).</p>}
    </Card>
  );
}
