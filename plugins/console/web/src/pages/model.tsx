import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { admin, ApiError, get, send, session } from "../api";
import { before, labelsText, modelState, type Model } from "../documents";
import { TryIt } from "../forms/try_it";
import { useLoaded } from "../loaded";
import { go, link, place, setQuery } from "../router";
import { Button, Confirm, ErrorLine, Head, Pending, State, Tabs } from "../ui";
import { CodeTab } from "./model_code";
import { FunctionTab } from "./model_function";
import { GraphTab } from "./model_graph";
import { KeysTab } from "./model_keys";
import { RaceTab } from "./model_race";
import { SettingsTab } from "./model_settings";
import { SummaryTab, VersionsTab } from "./model_versions";
import { WhereTab } from "./model_where";

/** A change that is asked for before it is made. */
export interface Question {
  title: string;
  action: string;
  danger?: boolean;
  means: ComponentChildren;
  run: () => Promise<unknown>;
}

export interface TabProps {
  model: Model;
  ask: (question: Question) => void;
  reload: () => void;
}

const TABS: [string, string][] = [
  ["summary", "Summary"],
  ["try", "Try it"],
  ["graph", "Steps"],
  ["function", "Function"],
  ["versions", "Versions"],
  ["race", "Compiled forms"],
  ["where", "Where it is loaded"],
  ["settings", "Settings"],
  ["code", "Code"],
  ["keys", "Keys"],
];

export function ModelPage() {
  const name = place.value.parts[1] ?? "";
  return session.value?.can.read ? <ReadModel name={name} /> : <CallableModel name={name} />;
}

function ReadModel(props: { name: string }) {
  const loaded = useLoaded((abort) => get<Model>(admin("models", props.name), abort), [props.name], 5);
  const { value: model, error, reload } = loaded;
  const [question, setQuestion] = useState<Question | null>(null);
  const asked = place.value.query.get("tab");
  // A question is about the tab on which it was asked.
  useEffect(() => setQuestion(null), [asked]);
  if (error instanceof ApiError && error.status === 403) return <CallableModel name={props.name} />;
  if (!model) {
    return (
      <>
        <Head title={props.name} />
        <Pending of={loaded} />
        <p><a href="#/models">All models</a></p>
      </>
    );
  }
  const can = session.value?.can;
  const has: Record<string, boolean | undefined> = {
    try: can?.infer,
    keys: can?.keys,
    graph: model.versions.some((one) => one.graph),
    function: model.versions.some((one) => one.function),
  };
  const tabs = TABS.filter(([tab]) => has[tab] ?? true);
  const active = tabs.find(([tab]) => tab === asked)?.[0] ?? "summary";
  const tab: TabProps = { model, ask: setQuestion, reload };
  return (
    <>
      <Title {...tab} />
      <ErrorLine error={error} again={reload} />
      <Tabs names={tabs} active={active} onPick={(picked) => setQuery({ tab: picked === "summary" ? "" : picked })} />
      <div role="tabpanel" aria-label={tabs.find(([one]) => one === active)?.[1]}>
        {active === "summary" && <SummaryTab {...tab} />}
        {active === "try" && <TryIt model={model.name} />}
        {active === "graph" && <GraphTab {...tab} />}
        {active === "function" && <FunctionTab {...tab} />}
        {active === "versions" && <VersionsTab {...tab} />}
        {active === "race" && <RaceTab {...tab} />}
        {active === "where" && <WhereTab {...tab} />}
        {active === "settings" && <SettingsTab {...tab} />}
        {active === "code" && <CodeTab model={model.name} />}
        {active === "keys" && <KeysTab {...tab} />}
      </div>
      {question && (
        <Confirm title={question.title} action={question.action} danger={question.danger} onDone={() => setQuestion(null)}
          run={async () => {
            await question.run();
            reload();
          }}>
          {question.means}
        </Confirm>
      )}
    </>
  );
}

function Title({ model, ask }: TabProps) {
  return (
    <>
      <Head title={<>{model.name} <State of={modelState(model)} /></>}>{session.value?.can.write && <Actions model={model} ask={ask} />}</Head>
      <p class="hint">
        {model.serving === null ? "No version answers." : `Version ${model.serving} answers.`}
        {model.active !== null && model.active !== model.serving && !model.unloaded && ` Version ${model.active} takes over when it is ready.`}
        {model.owner && ` Owner: ${model.owner}.`}
        {model.source && ` Served in place from ${model.source}.`}
        {Object.keys(model.labels).length > 0 && ` Labels: ${labelsText(model.labels)}.`}
      </p>
    </>
  );
}

function Actions({ model, ask }: Pick<TabProps, "model" | "ask">) {
  const older = before(model);
  const repository = (verb: string) => `call/v2/repository/models/${encodeURIComponent(model.name)}/${verb}`;
  return (
    <div class="actions">
      <a class="button" href={link(["upload"], { name: model.name })}>Upload a version</a>
      {older !== null && <Button onClick={() => ask(activation(model, older, true))}>{`Roll back to ${older}`}</Button>}
      {model.unloaded ? (
        <Button onClick={() => ask({
          title: `Load ${model.name}?`,
          action: "Load",
          means: <p>A worker loads it and it answers again. A version that failed to load is tried once more.</p>,
          run: () => send("POST", repository("load"), {}),
        })}>Load</Button>
      ) : (
        <Button onClick={() => ask({
          title: `Unload ${model.name}?`,
          action: "Unload",
          danger: true,
          means: <p>Its calls are refused until it is loaded again, and its memory becomes free. Nothing is deleted.</p>,
          run: () => send("POST", repository("unload"), {}),
        })}>Unload</Button>
      )}
      <Button kind="danger" onClick={() => ask({
        title: `Delete ${model.name}?`,
        action: "Delete for good",
        danger: true,
        means: (
          <p>
            All of its {model.versions.length === 1 ? "one version" : `${model.versions.length} versions`}, what was compiled from
            them and its settings are deleted. Its calls fail from now on. This cannot be undone.
          </p>
        ),
        run: async () => {
          await send("DELETE", admin("models", model.name));
          go(["models"]);
        },
      })}>Delete</Button>
    </div>
  );
}

/** The question before a version is made the one that answers. */
export function activation(model: Model, version: number, back = false): Question {
  const now = model.serving;
  return {
    title: back ? `Roll back to version ${version}?` : `Activate version ${version}?`,
    action: back ? "Roll back" : "Activate",
    means: (
      <p>
        Calls without a version will be answered by version {version}.{" "}
        {now !== null && now !== version && `Version ${now} answers until it is ready: no call fails in between. `}
        Nothing is deleted{now !== null && now !== version && `; version ${now} can be activated again`}.
      </p>
    ),
    run: () => send("POST", admin("models", model.name, "versions", String(version), "activate")),
  };
}

/** For keys that may call the model and not read all about it. */
function CallableModel(props: { name: string }) {
  return (
    <>
      <Head title={props.name} />
      <p class="hint">Your key may call this model, and not read more about it.</p>
      <TryIt model={props.name} />
      <CodeTab model={props.name} />
    </>
  );
}
