// Numbers as people read them; no line breaks between a number and its unit. null: not known.
type Known = number | null | undefined;
const NOT_KNOWN = "–";

function digits(value: number): string {
  const abs = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: abs >= 100 ? 0 : abs >= 10 ? 1 : 2 });
}

export function count(value: Known): string {
  return value == null ? NOT_KNOWN : Math.round(value).toLocaleString("en");
}

export function rate(value: Known): string {
  return value == null ? NOT_KNOWN : `${digits(value)}/s`;
}

export function percent(share: Known): string {
  return share == null ? NOT_KNOWN : `${digits(100 * share)}\u00a0%`;
}

export function seconds(value: Known): string {
  if (value == null) return NOT_KNOWN;
  if (value === 0) return "0\u00a0s";
  if (value < 1e-3) return `${digits(value * 1e6)}\u00a0µs`;
  if (value < 1) return `${digits(value * 1e3)}\u00a0ms`;
  if (value < 120) return `${digits(value)}\u00a0s`;
  if (value < 7200) return `${digits(value / 60)}\u00a0min`;
  return value < 172_800 ? `${digits(value / 3600)}\u00a0h` : `${digits(value / 86_400)}\u00a0days`;
}

export function bytes(value: Known): string {
  if (value == null) return NOT_KNOWN;
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]] as const) {
    if (Math.abs(value) >= size) return `${digits(value / size)}\u00a0${unit}`;
  }
  return `${value}\u00a0B`;
}

const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** An instant in the reader's zone. `at`: seconds since the epoch, or ISO 8601. */
export function when(at: number | string | null | undefined): string {
  const date = dateOf(at);
  return date ? clock.format(date) : NOT_KNOWN;
}

export function timeOfDay(at: number | string | null | undefined): string {
  const date = dateOf(at);
  return date ? short.format(date) : NOT_KNOWN;
}

export function ago(at: number | string | null | undefined): string {
  const date = dateOf(at);
  if (!date) return NOT_KNOWN;
  const past = (Date.now() - date.getTime()) / 1000;
  if (past < 5) return "just now";
  const step = past < 120 ? 1 : past < 7200 ? 60 : past < 172_800 ? 3600 : 86_400;
  return `${seconds(Math.round(past / step) * step)} ago`;
}

function dateOf(at: number | string | null | undefined): Date | null {
  if (at == null || at === "") return null;
  const date = new Date(typeof at === "number" ? at * 1000 : at);
  return Number.isNaN(date.getTime()) ? null : date;
}
