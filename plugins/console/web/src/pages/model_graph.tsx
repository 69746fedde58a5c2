// The steps of a graph, drawn with what was measured of them, and as a table.
import type { GraphDocument, Step, Version } from "../documents";
import { layoutOf, type Edge, type Node } from "../graph_layout";
import { link } from "../router";
import { Table } from "../table";
import { Badge, Card, Empty } from "../ui";
import { count, seconds } from "../units";
import { VersionTab } from "./model_function";
import type { TabProps } from "./model";

const CHARACTERS = { step: 22, end: 12 };
const BAR = 170;

export function GraphTab({ model }: TabProps) {
  return <VersionTab model={model} tab="graph" of={(one) => one.graph} show={(version) => version.graph && <GraphOf version={version} graph={version.graph} />} />;
}

function failures(step: Step | undefined): number {
  return Object.values(step?.measured?.failed ?? {}).reduce((sum, one) => sum + one, 0);
}

/** How often it did not answer through no fault of its own. */
function notRun({ measured }: Step): string {
  return [measured?.skipped && `${count(measured.skipped)} skipped`, measured?.withdrawn && `${count(measured.withdrawn)} withdrawn`].filter(Boolean).join(", ");
}

function GraphOf({ version, graph }: { version: Version; graph: GraphDocument }) {
  const steps = new Map(version.steps.map((one) => [one.step, one]));
  const layout = layoutOf(graph);
  const slowest = Math.max(1e-9, ...version.steps.map((one) => (one.measured?.queue_s ?? 0) + (one.measured?.run_s ?? 0)));
  return (
    <div class="cards">
      <Card title={`Steps of version ${version.version}`} wide>
        <ul class="legend" aria-label="times of a step">
          <li><span class="swatch queue" aria-hidden="true" />until its run</li>
          <li><span class="swatch run" aria-hidden="true" />its run</li>
          <li>A broken line: a condition reads it.</li>
        </ul>
        <div class="graph" tabIndex={0} role="region" aria-label="drawing of the graph">
          <svg role="img" aria-label={`graph of ${version.steps.length} steps; the table below says the same`} width={layout.width} height={layout.height} viewBox={`0 0 ${layout.width} ${layout.height}`}>
            <defs>
              <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 Z" /></marker>
            </defs>
            {layout.edges.map((edge) => <EdgeLine key={edge.points.join(" ")} edge={edge} />)}
            {layout.nodes.map((node) => (node.kind === "step" ? <StepBox key={`s ${node.name}`} node={node} step={steps.get(node.name)} slowest={slowest} /> : <EndBox key={`${node.kind} ${node.name}`} node={node} />))}
          </svg>
        </div>
        <p class="hint">Counts and times are those of the gateways of this machine. The times in the drawing are means, p50 and p99 are of the whole step. A model is as busy as all who call it make it.</p>
      </Card>
      <Card title="The same as a table" wide>
        <StepTable graph={graph} steps={version.steps} />
      </Card>
    </div>
  );
}

function cut(text: string, characters: number): string {
  return text.length > characters ? `${text.slice(0, characters - 1)}…` : text;
}

function EdgeLine({ edge: { points, condition } }: { edge: Edge }) {
  const [first, ...rest] = points;
  let [x, y] = first ?? [0, 0];
  const way = rest.map(([toX, toY]) => {
    const bend = (toX - x) / 2;
    const curve = `C${x + bend},${y} ${toX - bend},${toY} ${toX},${toY}`;
    [x, y] = [toX, toY];
    return curve;
  });
  return <path class={condition ? "edge condition" : "edge"} d={`M${first?.join(",")} ${way.join(" ")}`} marker-end="url(#arrow)" />;
}

function EndBox({ node }: { node: Node }) {
  return (
    <g>
      <title>{`${node.kind} ${node.name}`}</title>
      <rect class="end" x={node.x} y={node.y} width={node.width} height={node.height} rx={17} />
      <text x={node.x + node.width / 2} y={node.y + 22} text-anchor="middle">{cut(node.name, CHARACTERS.end)}</text>
    </g>
  );
}

function StepBox({ node, step, slowest }: { node: Node; step: Step | undefined; slowest: number }) {
  const measured = step?.measured;
  const wrong = failures(step);
  const model = step ? `${step.model} v${step.version}` : "";
  const [queue, run] = [((measured?.queue_s ?? 0) / slowest) * BAR, ((measured?.run_s ?? 0) / slowest) * BAR];
  const said = measured?.answered ? `${seconds(measured.queue_s)} + ${seconds(measured.run_s)}` : measured?.skipped ? "was only skipped" : "did not run yet";
  return (
    <g>
      <title>{`step ${node.name}, model ${model}: ${said}${wrong ? `, ${wrong} failed` : ""}`}</title>
      <rect class={wrong ? "step wrong" : "step"} x={node.x} y={node.y} width={node.width} height={node.height} rx={8} />
      <text class="name" x={node.x + 10} y={node.y + 20}>{cut(node.name, CHARACTERS.step)}</text>
      <text class="muted" x={node.x + 10} y={node.y + 38}>{cut(model, CHARACTERS.step + 2)}</text>
      <text x={node.x + 10} y={node.y + 57}>{cut(said, CHARACTERS.step + 2)}</text>
      <rect class="queue" x={node.x + 10} y={node.y + 66} width={queue} height={6} />
      <rect class="run" x={node.x + 10 + queue} y={node.y + 66} width={run} height={6} />
      {wrong > 0 && <text class="wrong" x={node.x + node.width - 10} y={node.y + 20} text-anchor="end">{count(wrong)} failed</text>}
    </g>
  );
}

function StepTable({ graph, steps }: { graph: GraphDocument; steps: Step[] }) {
  if (!steps.length) return <Empty>It has no step.</Empty>;
  return (
    <Table label="steps of the graph" rows={steps} keyOf={(row) => row.step} columns={[
      { name: "Step", cell: (row) => <span class="any">{row.step}</span>, by: (row) => row.step },
      { name: "Model", cell: (row) => <><a href={link(["models", row.model], { tab: "versions", version: String(row.version) })}>{row.model}</a>{`\u00a0v${row.version}`}</>, by: (row) => row.model },
      {
        name: "Takes",
        cell: (row) => (
          <span class="any">
            {Object.entries(graph.steps[row.step]?.inputs ?? {}).map(([name, sources]) => <div key={name}>{`${name} = ${sources.join(" or ")}`}</div>)}
            {graph.steps[row.step]?.if && <div class="hint">if {graph.steps[row.step]?.if}</div>}
          </span>
        ),
      },
      { name: "Answered", cell: (row) => <>{count(row.measured?.answered ?? 0)}<div class="hint">{notRun(row)}</div></>, by: (row) => row.measured?.answered ?? 0, right: true },
      { name: "Until its run", cell: (row) => seconds(row.measured?.queue_s), by: (row) => row.measured?.queue_s ?? null, right: true },
      { name: "Run", cell: (row) => seconds(row.measured?.run_s), by: (row) => row.measured?.run_s ?? null, right: true },
      { name: "p50, p99", cell: (row) => `${seconds(row.measured?.p50_s)}, ${seconds(row.measured?.p99_s)}`, by: (row) => row.measured?.p99_s ?? null, right: true },
      {
        name: "Failed",
        cell: (row) => (failures(row) ? <Badge kind="bad">{Object.entries(row.measured?.failed ?? {}).map(([code, times]) => `${count(times)} ${code}`).join(", ")}</Badge> : "–"),
        by: (row) => failures(row),
      },
    ]} />
  );
}
