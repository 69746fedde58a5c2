// A version that is a function: its environment, what it may do, its code, and how its environment was built.
import type { ComponentChildren } from "preact";
import { admin, ApiError, get } from "../api";
import type { FunctionDocument, Model, Version } from "../documents";
import { Field } from "../fields";
import { useLoaded } from "../loaded";
import { place, setQuery } from "../router";
import { Card, Code, Empty, Facts, Pending } from "../ui";

/** What GET …/versions/N/function says, to those who may change the model. */
interface FunctionPage {
  file: string;
  code: string;
  cut: boolean;
  build_log: string;
}

/** A tab about one version of those that have something: the one that is asked for, that answers, or the last one. */
export function VersionTab(props: { model: Model; tab: string; of: (version: Version) => unknown; show: (version: Version) => ComponentChildren }) {
  const known = props.model.versions.filter((one) => one.version !== null && props.of(one));
  const asked = place.value.query.get("version");
  const shown = known.find((one) => String(one.version) === asked) ?? known.find((one) => one.version === props.model.serving) ?? known.at(-1);
  if (!shown) return <Empty>No version has one.</Empty>;
  return (
    <>
      {known.length > 1 && (
        <div class="filters">
          <Field title="Version" value={String(shown.version)} options={known.map((one) => [String(one.version), String(one.version)])}
            onText={(chosen) => setQuery({ tab: props.tab, version: chosen })} />
        </div>
      )}
      {props.show(shown)}
    </>
  );
}

export function FunctionTab({ model }: { model: Model }) {
  return (
    <VersionTab model={model} tab="function" of={(one) => one.function}
      show={(version) => version.function && <FunctionOf key={version.version} version={version} about={version.function} />} />
  );
}

function FunctionOf({ version, about }: { version: Version; about: FunctionDocument }) {
  const path = admin("models", version.model, "versions", String(version.version), "function");
  const loaded = useLoaded<{ page: FunctionPage | null }>(
    async (abort) => {
      try {
        return { page: await get<FunctionPage>(path, abort) };
      } catch (error) {
        if (error instanceof ApiError && error.status === 403) return { page: null };
        throw error;
      }
    },
    [path],
  );
  const page = loaded.value?.page;
  return (
    <>
      <div class="cards">
        <Card title="Its environment">
          <Facts of={[
            ["File", about.file],
            ["Python", about.python],
            ["Packages", about.packages === null
              ? "Those of the server: it declares none."
              : about.packages.length ? <ul class="plain">{about.packages.map((one) => <li key={one}><code>{one}</code></li>)}</ul> : "None."],
          ]} />
        </Card>
        <Card title="What it may do">
          <ul>{about.may.map((one) => <li key={one}>{one}</li>)}</ul>
        </Card>
        <Card title={`Code of version ${version.version}`} wide>
          {page ? <Code text={page.code} label="code of the function" /> : loaded.value ? <Empty>Your key may not change this model, so it does not see its code.</Empty> : <Pending of={loaded} />}
          {page?.cut && <p class="hint">The file is longer: this is its beginning.</p>}
        </Card>
        {page && about.packages !== null && (
          <Card title="How its environment was built" wide>
            {page.build_log ? <Code text={page.build_log} label="build log" /> : <Empty>This machine has not built it, or its log is gone.</Empty>}
          </Card>
        )}
      </div>
    </>
  );
}
