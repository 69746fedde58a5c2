import { admin, get } from "../api";
import { useLoaded } from "../loaded";
import { Table } from "../table";
import { Badge, Card, Pending } from "../ui";
import { when } from "../units";
import type { Key } from "./key_fields";
import type { TabProps } from "./model";

/** Whether a glob of a scope (`*` and `?`) matches a name. */
export function matches(glob: string, name: string): boolean {
  const pattern = glob.replace(/[.+^${}()|[\]\\-]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${pattern}$`, "s").test(name);
}

const VERBS: [string, string][] = [["infer", "call it"], ["models:read", "read about it"], ["models:write", "change it"]];

/** What a key may do with a model, and the scopes that allow it. */
function allowed(key: Key, model: string): { may: string[]; by: string[] } {
  if (key.scopes.includes("admin")) return { may: ["everything"], by: ["admin"] };
  const may = new Set<string>();
  const by = key.scopes.filter((scope) =>
    VERBS.some(([verb, words]) => {
      const glob = scope === verb ? "*" : scope.startsWith(`${verb}:`) ? scope.slice(verb.length + 1) : null;
      if (glob === null || !matches(glob, model)) return false;
      may.add(words);
      return true;
    }),
  );
  return { may: [...may], by };
}

export function KeysTab({ model }: TabProps) {
  const keys = useLoaded((abort) => get<{ keys: Key[] }>(admin("keys"), abort), [], 15);
  const rows = (keys.value?.keys ?? [])
    .map((key) => ({ key, ...allowed(key, model.name) }))
    .filter((row) => row.may.length && row.key.state !== "revoked");
  return (
    <>
      <Pending of={keys} />
      {keys.value && (
        <Card title="Keys that may call or change it" aside={<a href="#/keys">All keys</a>}>
          <Table label="keys of the model" rows={rows} keyOf={(row) => row.key.id} sort="Key" empty="No key may. Create one on the page Keys." columns={[
            { name: "Key", cell: (row) => row.key.name, by: (row) => row.key.name },
            { name: "May", cell: (row) => row.may.join(", ") },
            { name: "By", cell: (row) => row.by.map((scope) => <Badge key={scope}>{scope}</Badge>) },
            { name: "State", cell: (row) => <Badge kind={row.key.state === "live" ? "good" : "warn"}>{row.key.state}</Badge>, by: (row) => row.key.state },
            { name: "Until", cell: (row) => (row.key.expires_at === null ? "no end" : when(row.key.expires_at)), by: (row) => row.key.expires_at },
          ]} />
        </Card>
      )}
    </>
  );
}
