// The address of a page is behind the hash, so that links work below any path prefix: #/models/NAME?tab=try
import { computed, signal } from "@preact/signals";

const hash = signal(location.hash);
addEventListener("hashchange", () => {
  hash.value = location.hash;
});

export interface Place {
  parts: string[];
  query: URLSearchParams;
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const place = computed<Place>(() => {
  const [path = "", query = ""] = hash.value.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
});

/** The link to a page: `link(["models", name], { tab: "try" })`. */
export function link(parts: string[], query: Record<string, string> = {}): string {
  const asked = new URLSearchParams(query).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${asked ? `?${asked}` : ""}`;
}

export function go(parts: string[], query: Record<string, string> = {}): void {
  location.hash = link(parts, query);
}

/** Changes the query of the page without a step in the history, for tabs and filters. */
export function setQuery(query: Record<string, string>): void {
  const filled = Object.fromEntries(Object.entries(query).filter(([, value]) => value));
  history.replaceState(null, "", link(place.value.parts, filled));
  hash.value = location.hash;
}
