// One plot, with its title and a legend of the current values or of those under the pointer.

import uPlot from "uplot";
import type { Panel, Unit } from "./panels";

const HEIGHT = 170;
// Steps of an axis that counts.
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5].flatMap((power) => [power, 2 * power, 5 * power]);

export class Plot {
  readonly element = document.createElement("figure");
  private readonly values: HTMLElement[] = [];
  private readonly chart: uPlot;
  private readonly canvas: HTMLElement;

  constructor(private readonly panel: Panel) {
    const caption = document.createElement("figcaption");
    const title = document.createElement("h2");
    title.textContent = panel.title;
    const note = document.createElement("p");
    note.textContent = panel.note;
    const legend = document.createElement("ul");
    legend.append(...panel.lines.map(({ label }, index) => this.legendEntry(label, index)));
    caption.append(title, note, legend);
    this.canvas = document.createElement("div");
    this.element.append(caption, this.canvas);
    this.chart = new uPlot(this.options(), [[]], this.canvas);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  /** Show points of lines: the times, and the values of each line; `from` and `to` are the ends of the axis. */
  show(times: number[], lines: (number | null)[][], from: number, to: number): void {
    this.chart.setData([times, ...lines] as uPlot.AlignedData, false);
    this.chart.setScale("x", { min: from, max: to });
    if (this.chart.cursor.idx === null || this.chart.cursor.idx === undefined) this.write(times.length - 1);
    const last = lines.map((values, index) => {
      return `${this.panel.lines[index]?.label} ${written(values.at(-1), this.panel.unit)}`;
    });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${this.panel.title}: ${last.join(", ")}`);
  }

  /** Draw again, as after a change of colours. */
  redraw(): void {
    this.chart.redraw(false, true);
  }

  private resize(): void {
    const width = this.canvas.clientWidth;
    if (width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  private legendEntry(label: string, index: number): HTMLElement {
    const entry = document.createElement("li");
    entry.className = `line-${index}`;
    const value = document.createElement("b");
    value.textContent = NOTHING;
    this.values.push(value);
    entry.append(label, " ", value);
    return entry;
  }

  private write(place: number): void {
    for (const [index, value] of this.values.entries()) {
      value.textContent = written(this.chart.data[index + 1]?.[place], this.panel.unit);
    }
  }

  private options(): uPlot.Options {
    const color = (name: string) => () => getComputedStyle(this.element).getPropertyValue(name);
    const axis: uPlot.Axis = {
      stroke: color("--faint"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: color("--line"), width: 1 },
      ticks: { show: false },
    };
    return {
      width: 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
      padding: [8, 28, 0, 0],
      scales: { x: { time: true }, y: { range: (_chart, _low, high) => [0, top(high, this.panel.unit)] } },
      axes: [
        {
          ...axis,
          size: 28,
          space: 70,
          values: (_chart, times) => times.map((time) => clock(time, span(times))),
        },
        {
          ...axis,
          size: 62,
          space: 34,
          incrs: this.panel.unit === "count" ? WHOLE : undefined,
          values: (_chart, values) => values.map((v) => (v ? written(v, this.panel.unit) : "0")),
        },
      ],
      series: [
        {},
        ...this.panel.lines.map(({ label }, index) => ({
          label,
          stroke: color(`--line-${index}`),
          width: 1.75,
          points: { size: 4, fill: color(`--line-${index}`) },
        })),
      ],
      hooks: { setCursor: [(chart) => this.write(chart.cursor.idx ?? chart.data[0].length - 1)] },
    };
  }
}

const NOTHING = "–";

/** The upper end of the axis for a greatest value. */
function top(high: number | null, unit: Unit): number {
  if (unit === "share") return [0.1, 0.5].find((end) => (high ?? 1) < end * 0.8) ?? 1;
  if (!high) return unit === "seconds" ? 0.1 : 1;
  return high * 1.1;
}

function span(times: number[]): number {
  return (times.at(-1) ?? 0) - (times[0] ?? 0);
}

function clock(time: number, span: number): string {
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" } as const;
  const seconds = span > 600 ? {} : ({ second: "2-digit" } as const);
  return new Date(time * 1000).toLocaleTimeString([], { ...parts, ...seconds });
}

/** A value with its unit, in few characters. */
export function written(value: number | null | undefined, unit: Unit): string {
  if (value === null || value === undefined) return NOTHING;
  if (unit === "share") return `${short(value * 100)} %`;
  if (unit === "seconds") return value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`;
  return unit === "per second" ? `${short(value)}/s` : short(value);
}

/** Three digits that count. */
function short(value: number): string {
  if (value >= 1e6) return `${short(value / 1e6)}M`;
  if (value >= 1e4) return `${short(value / 1e3)}k`;
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}
