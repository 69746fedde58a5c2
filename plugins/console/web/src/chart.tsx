// A line chart over time, by uPlot, in the colours of the page.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { timeOfDay } from "./units";

export interface Line {
  name: string;
  values: (number | null)[];
  colour?: "a" | "b" | "c" | "bad";
}

const HEIGHT = 180;
const SPAN_MIN_S = 60; // shorter, and the axis repeats its seconds

export function Chart(props: { at: number[]; lines: Line[]; unit: (value: number | null) => string; label: string }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const shape = props.lines.map((line) => line.name).join();
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    // A canvas knows no variables and no light-dark(): an element of the page says which colour they are now.
    const colour = (name: string) => {
      element.style.color = `var(${name})`;
      return getComputedStyle(element).color;
    };
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const made = new uPlot(
      {
        width: element.clientWidth || 300,
        height: HEIGHT,
        cursor: { y: false },
        legend: { live: true },
        scales: { x: { range: (_plot, low, high) => [Math.min(low, high - SPAN_MIN_S), high] }, y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, space: 90, values: (_plot, ticks) => ticks.map(timeOfDay) },
          { ...axis, size: 64, values: (_plot, ticks) => ticks.map((tick) => props.unit(tick)) },
        ],
        series: [
          { label: "time", value: (_plot: uPlot, at: number | null) => timeOfDay(at) },
          ...props.lines.map((line, at) => ({
            label: line.name,
            stroke: colour(`--line-${line.colour ?? "abc"[at % 3]}`),
            width: 2,
            spanGaps: false,
            value: (_plot: uPlot, value: number | null) => props.unit(value),
          })),
        ],
      },
      [props.at, ...props.lines.map((line) => line.values)],
      element,
    );
    plot.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth || 300, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData([props.at, ...props.lines.map((line) => line.values)]), [props.at, props.lines]);
  return <div class="chart" ref={box} role="img" aria-label={props.label} />;
}
