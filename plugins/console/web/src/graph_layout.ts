// Where the steps of a graph are drawn: in layers from the left to the right, each behind all that it waits for.
import type { GraphDocument } from "./documents";

export interface Node {
  name: string;
  kind: "input" | "step" | "output";
  x: number;
  y: number;
  width: number;
  height: number;
}
export interface Edge {
  /** The way of the line: of the node that it comes from, past others, of the one that it goes to. */
  points: [x: number, y: number][];
  /** A condition reads it: the step does not get it. */
  condition: boolean;
}
export interface Layout {
  nodes: Node[];
  edges: Edge[];
  width: number;
  height: number;
}

const STEP = { width: 190, height: 84 };
const END = { width: 96, height: 34 };
const GAP = { x: 48, y: 22 };
const MARGIN = 8;
const PASS = { width: 0, height: 10 }; // of a line that passes a layer
const PASS_MARK = "p ";

/** What a source names: the part before its first dot, where that is a step. */
function producer(source: string, steps: GraphDocument["steps"]): string | null {
  const dot = source.indexOf(".");
  const before = source.slice(0, dot);
  return dot > 0 && Object.hasOwn(steps, before) ? before : null;
}

/** The steps and inputs that a condition reads, as far as they are known. */
function readBy(condition: string, steps: GraphDocument["steps"], inputs: Iterable<string>): string[] {
  const words = new Set(condition.split(/[^A-Za-z0-9_-]+/));
  const dotted = Object.keys(steps).filter((name) => words.has(name) && condition.includes(`${name}.`)).map((name) => `s ${name}`);
  return [...dotted, ...[...inputs].filter((name) => words.has(name)).map((name) => `i ${name}`)];
}

export function layoutOf(graph: GraphDocument): Layout {
  const steps = graph.steps;
  const id = (source: string) => {
    const step = producer(source, steps);
    return step === null ? `i ${source}` : `s ${step}`;
  };
  const sources = Object.values(steps).flatMap((step) => Object.values(step.inputs ?? {}).flat());
  const inputs = new Set([...Object.keys(graph.inputs ?? {}), ...sources.filter((one) => producer(one, steps) === null)]);
  const before: Above = new Map<string, Map<string, boolean>>([...inputs].map((name) => [`i ${name}`, new Map()]));
  for (const [name, step] of Object.entries(steps)) {
    const reads = readBy(step.if ?? "", steps, inputs).filter((one) => one !== `s ${name}`).map((one): [string, boolean] => [one, true]);
    const takes = Object.values(step.inputs ?? {}).flat().map((one): [string, boolean] => [id(one), false]);
    before.set(`s ${name}`, new Map([...reads, ...takes]));
  }
  for (const [name, of] of Object.entries(graph.outputs ?? {})) before.set(`o ${name}`, new Map(of.map((one) => [id(one), false])));
  return placed(...layered(before));
}

type Above = Map<string, Map<string, boolean>>; // what each waits for, and whether a condition alone reads it

/** The nodes of each layer, and the ways of the lines: nodes in between keep them from crossing others. */
function layered(before: Above): [layers: string[][], ways: [way: string[], condition: boolean][]] {
  const depth = new Map<string, number>();
  const depthOf = (name: string): number => {
    const known = depth.get(name);
    if (known !== undefined) return known;
    depth.set(name, 0); // a document that tells of a cycle ends here
    const above = [...(before.get(name)?.keys() ?? [])].filter((one) => before.has(one)).map(depthOf);
    const found = name.startsWith("i ") ? 0 : 1 + Math.max(0, ...above);
    depth.set(name, found);
    return found;
  };
  const last = Math.max(...[...before.keys()].map(depthOf));
  const layerOf = (name: string) => (name.startsWith("o ") ? last : depthOf(name));
  const layers = Array.from({ length: last + 1 }, (): string[] => []);
  for (const name of before.keys()) layers[layerOf(name)]?.push(name);
  const above = new Map([...before].map(([name, of]): [string, string[]] => [name, [...of.keys()]]));
  const ways: [string[], boolean][] = [];
  for (const [name, of] of before) {
    for (const [source, condition] of of) {
      if (!before.has(source)) continue;
      const way = [source];
      for (let at = layerOf(source) + 1; at < layerOf(name); at += 1) {
        const pass = `${PASS_MARK}${source} ${at}`; // lines from one source pass together
        if (!above.has(pass)) {
          layers[at]?.push(pass);
          above.set(pass, [way.at(-1) ?? source]);
        }
        way.push(pass);
      }
      ways.push([[...way, name], condition]);
      above.set(name, (above.get(name) ?? []).map((one) => (one === source ? (way.at(-1) ?? one) : one)));
    }
  }
  // A node is near the rows of what it takes.
  const row = new Map<string, number>();
  for (const layer of layers) {
    const weights = new Map(layer.map((name) => {
      const rows = (above.get(name) ?? []).map((one) => row.get(one) ?? 0);
      return [name, rows.reduce((sum, one) => sum + one, 0) / Math.max(1, rows.length)];
    }));
    layer.sort((a, b) => (weights.get(a) ?? 0) - (weights.get(b) ?? 0));
    layer.forEach((name, at) => row.set(name, at - (layer.length - 1) / 2));
  }
  return [layers.filter((layer) => layer.length), ways];
}

function sizeOf(name: string) {
  return name.startsWith("s ") ? STEP : name.startsWith(PASS_MARK) ? PASS : END;
}

function placed(layers: string[][], ways: [string[], boolean][]): Layout {
  const heights = layers.map((layer) => layer.reduce((sum, name) => sum + sizeOf(name).height + GAP.y, -GAP.y));
  const height = Math.max(...heights);
  const nodes: Node[] = [];
  const ends = new Map<string, { left: [number, number]; right: [number, number] }>();
  let x = MARGIN;
  layers.forEach((layer, at) => {
    const width = Math.max(...layer.map((name) => sizeOf(name).width));
    let y = MARGIN + (height - (heights[at] ?? 0)) / 2;
    for (const name of layer) {
      const size = sizeOf(name);
      const passes = name.startsWith(PASS_MARK);
      const left = x + (passes ? 0 : (width - size.width) / 2);
      const middle = y + size.height / 2;
      ends.set(name, { left: [left, middle], right: [passes ? x + width : left + size.width, middle] });
      const kind = name.startsWith("s ") ? "step" : name.startsWith("i ") ? "input" : "output";
      if (!passes) nodes.push({ name: name.slice(2), kind, x: left, y, ...size });
      y += size.height + GAP.y;
    }
    x += width + GAP.x;
  });
  const edges = ways.map(([way, condition]): Edge => {
    const points = way.flatMap((name, at) => {
      const end = ends.get(name);
      if (!end) return [];
      return at === 0 ? [end.right] : at === way.length - 1 ? [end.left] : [end.left, end.right];
    });
    return { points, condition };
  });
  return { nodes, edges, width: x - GAP.x + MARGIN, height: height + 2 * MARGIN };
}
