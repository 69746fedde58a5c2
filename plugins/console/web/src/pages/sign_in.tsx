import { useState } from "preact/hooks";
import { session, signIn, signedOutBecause } from "../api";
import { Field } from "../fields";
import { go, place } from "../router";
import { Button, Code, ErrorLine } from "../ui";

export function SignInPage() {
  const [key, setKey] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await signIn(key.trim());
      if (place.value.parts[0] === "sign-in") go([]);
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return (
    <div class="sign-in">
      <h1>Millstream</h1>
      {signedOutBecause.value && <p class="note" role="status">{signedOutBecause.value}</p>}
      <form onSubmit={submit}>
        <Field title="API key" type="password" autocomplete="current-password" required value={key} onText={setKey} />
        <ErrorLine error={error} />
        <div class="actions">
          <Button type="submit" kind="main" disabled={busy || !key.trim()}>Sign in</Button>
        </div>
      </form>
      <h2>On the server's own machine</h2>
      <p class="hint">This prints a link that signs you in, as the user who runs the server{session.value?.home && ` with the home ${session.value.home}`}:</p>
      <Code text="millstream console" label="command" />
    </div>
  );
}
