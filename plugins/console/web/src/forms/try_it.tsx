// Try it: a form for what the model takes, and its answer as people read it.
import { useEffect, useRef, useState } from "preact/hooks";
import { get } from "../api";
import { tensorText, type Metadata } from "../documents";
import { Check } from "../fields";
import { useKept, useLoaded } from "../loaded";
import { Button, Card, Empty, ErrorLine, Pending, Tabs } from "../ui";
import { AnswerView } from "./answer";
import { call, scored, type Answer, type Ask } from "./call";
import { KINDS } from "./kinds";

const CLASSES = 5;

export function TryIt(props: { model: string }) {
  const loaded = useLoaded((abort) => get<Metadata>(`call/v2/models/${encodeURIComponent(props.model)}`, abort), [props.model]);
  return loaded.value ? <Trial metadata={loaded.value} /> : <Pending of={loaded} />;
}

function Trial({ metadata }: { metadata: Metadata }) {
  const kept = `try ${metadata.name}`;
  const [picked, pick] = useKept(`${kept} kind`);
  const [classes, setClasses] = useKept(`${kept} classes`);
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);
  const kinds = KINDS.filter((kind) => kind.fits(metadata));
  const kind = kinds.find((one) => one.name === picked) ?? kinds[0];
  if (!kind) return null;
  const send = async (ask: Ask) => {
    const abort = new AbortController();
    running.current = abort;
    setBusy(true);
    setError(null);
    try {
      setAnswer(await call(metadata, ask, { classes: classes ? CLASSES : 0 }, abort.signal));
    } catch (failure) {
      if (!abort.signal.aborted) setError(failure);
    }
    setBusy(false);
  };
  const View = kind.View ?? AnswerView;
  return (
    <div class="cards">
      <Card title="What to send">
        <p class="hint">It takes {metadata.parameters?.usage?.sentence ?? metadata.inputs.map(tensorText).join("; ")}.</p>
        {kinds.length > 1 && <Tabs names={kinds.map((one) => [one.name, one.title])} active={kind.name} onPick={pick} />}
        {scored(metadata) && kind.name !== "json" && (
          <Check title={`Answer the ${CLASSES} best classes, with their names where the model has some`} checked={!!classes} onCheck={(checked) => setClasses(checked ? "1" : "")} />
        )}
        <kind.Form key={kind.name} metadata={metadata} kept={`${kept} ${kind.name}`} busy={busy} send={send} />
        {busy && <div class="actions"><Button onClick={() => running.current?.abort()}>Stop waiting</Button></div>}
      </Card>
      <Card title="Answer">
        <div aria-live="polite">
          <ErrorLine error={error} />
          {busy ? <Empty>The model works…</Empty> : answer && !error ? <View metadata={metadata} answer={answer} /> : !error && <Empty>Nothing was sent yet.</Empty>}
        </div>
      </Card>
    </div>
  );
}
