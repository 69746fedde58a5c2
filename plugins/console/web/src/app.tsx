// The frame around the pages: who is signed in, what can be opened, and whether the server answers.
import type { ComponentType } from "preact";
import { useEffect, useState } from "preact/hooks";
import { readSession, session, signIn, signOut, signedOutBecause, type Session } from "./api";
import { connection, unwatch, watch } from "./live";
import { AuditPage } from "./pages/audit";
import { KeysPage } from "./pages/keys";
import { LogsPage } from "./pages/logs";
import { ModelPage } from "./pages/model";
import { ModelsPage } from "./pages/models";
import { OverviewPage } from "./pages/overview";
import { RequestsPage } from "./pages/requests";
import { ScalingPage } from "./pages/scaling";
import { SignInPage } from "./pages/sign_in";
import { UploadPage } from "./pages/upload";
import { WorkersPage } from "./pages/workers";
import { link, place } from "./router";
import { Button, Empty, ErrorLine } from "./ui";
import { percent } from "./units";
import { isBusy, run } from "./upload_run";

interface Page {
  name: string;
  title: string;
  page: ComponentType;
  allowed: (can: Session["can"]) => boolean;
}

const PAGES: Page[] = [
  { name: "", title: "Overview", page: OverviewPage, allowed: (can) => can.watch },
  { name: "models", title: "Models", page: ModelsPage, allowed: (can) => can.read || can.infer },
  { name: "upload", title: "Upload", page: UploadPage, allowed: (can) => can.write },
  { name: "workers", title: "Workers", page: WorkersPage, allowed: (can) => can.read },
  { name: "scaling", title: "Autoscaling", page: ScalingPage, allowed: (can) => can.read },
  { name: "requests", title: "Requests", page: RequestsPage, allowed: (can) => can.read },
  { name: "logs", title: "Logs", page: LogsPage, allowed: (can) => can.keys },
  { name: "keys", title: "Keys", page: KeysPage, allowed: (can) => can.keys },
  { name: "audit", title: "Audit", page: AuditPage, allowed: (can) => can.keys },
];

/** The login link of `millstream console` has the key behind the hash, which no browser sends to a server. */
function takeLogin(): string | null {
  const found = /^#login=(.+)$/.exec(location.hash);
  if (!found?.[1]) return null;
  location.replace("#/"); // tells the router, too
  return decodeURIComponent(found[1]);
}

export function App() {
  const [error, setError] = useState<unknown>(null);
  const start = async () => {
    setError(null);
    const key = takeLogin();
    try {
      if (key) {
        await signIn(key).catch((failure: unknown) => {
          signedOutBecause.value = failure instanceof Error ? failure.message : String(failure);
        });
      }
      await readSession();
    } catch (failure) {
      setError(failure);
    }
  };
  useEffect(() => void start(), []);
  const who = session.value;
  const looks = !!who?.can.watch;
  useEffect(() => {
    if (looks) watch();
    return unwatch;
  }, [looks]);
  if (error) return <main><ErrorLine error={error} again={start} /></main>;
  if (!who) return null;
  const pages = PAGES.filter((page) => page.allowed(who.can));
  if (!pages.length || (signedOutBecause.value && !who.signed_in)) return <main><SignInPage /></main>;
  return <Shell pages={pages} who={who} />;
}

/** How much of an upload that goes on beside this page was sent. */
function uploaded(): string {
  return run.value?.stage === "sending" ? percent(Math.floor((100 * run.value.sent) / (run.value.total || 1)) / 100) : "is checked";
}

function Shell(props: { pages: Page[]; who: Session }) {
  const [name = "", ...more] = place.value.parts;
  const open = props.pages.find((page) => page.name === name) ?? (name ? undefined : props.pages[0]);
  const title = name === "models" && more[0] ? more[0] : (open?.title ?? "Not found");
  useEffect(() => {
    document.title = `${title} · Millstream`;
  }, [title]);
  const wanted = name === "models" && more[0] ? ModelPage : name === "sign-in" ? SignInPage : open?.page;
  // Who has not signed in and follows a link to a page of others may do so now, and is there then.
  const Content = wanted ?? (props.who.signed_in ? undefined : SignInPage);
  return (
    <div class="shell">
      <a class="skip" href="#content" onClick={(event) => (event.preventDefault(), document.getElementById("content")?.focus())}>
        Skip to the page
      </a>
      <aside class="side">
        <a class="brand" href="#/"><img src="icon.svg" alt="" />Millstream</a>
        <nav aria-label="pages">
          {props.pages.map((page) => (
            <a key={page.name} href={link([page.name].filter(Boolean))} aria-current={page === open ? "page" : undefined}>
              {page.title}{page.name === "upload" && isBusy() && ` ${uploaded()}`}
            </a>
          ))}
        </nav>
        <div class="who">
          {props.who.signed_in ? (
            <>
              <div>Signed in as {props.who.name ?? "operator"}</div>
              <Button onClick={() => void signOut()}>Sign out</Button>
            </>
          ) : (
            <a href="#/sign-in">Sign in</a>
          )}
          <div>{props.who.version}</div>
        </div>
      </aside>
      <main id="content" tabIndex={-1}>
        {connection.value === "lost" && (
          <p class="note" role="status">The server does not answer. What you see is from before; the page tries again.</p>
        )}
        {Content && !props.who.signed_in && !props.who.keys_required && name !== "sign-in" && (
          <p class="note">
            There is no key yet, so anybody may call the models here. Requests, workers and changes are for who runs the server: <a href="#/sign-in">sign in</a>.
          </p>
        )}
        {Content ? <Content key={place.value.parts.join("/")} /> : <Empty>There is no such page, or your key may not open it.</Empty>}
      </main>
    </div>
  );
}
