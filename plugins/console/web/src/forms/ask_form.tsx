// The frame of the forms with which a model is tried.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Button, ErrorLine } from "../ui";
import type { Ask } from "./call";

/** A form that sends what `ask` returns; what `ask` throws is shown. `reset`: goes back to the example. */
export function AskForm(props: {
  ask: () => Ask | Promise<Ask>;
  send: (ask: Ask) => void;
  disabled: boolean;
  reset?: (() => void) | false;
  children: ComponentChildren;
}) {
  const [error, setError] = useState<unknown>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    setError(null);
    try {
      props.send(await props.ask());
    } catch (failure) {
      setError(failure);
    }
  };
  return (
    <form onSubmit={(event) => void submit(event)}>
      {props.children}
      <ErrorLine error={error} />
      <div class="actions">
        <Button type="submit" kind="main" disabled={props.disabled}>Send</Button>
        {props.reset && <Button onClick={props.reset}>Back to the example</Button>}
      </div>
    </form>
  );
}
