// A line chart: uPlot with our axes and colours, a legend of its own that follows the pointer, and words for those
// who can't see it. Colours come from the style sheet, so a chart is redrawn when the theme changes.

import { h, setAttribute, setText } from "./dom.js";
import { duration, short, timeOfDay } from "./format.js";

/** Points from which the newest value is taken. */
const RECENT = 20;

const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);

/** The value of a colour of the style sheet, such as "--ink", in the present theme. */
export function colour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const fade = (rgb, alpha) => rgb.replace(/^rgba?\(([^)]+)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3)}, ${alpha})`);

/** Ticks of a logarithmic axis: whole decades, not more than about six, and 2 and 5 between them where they are few. */
function decades(low, high) {
  const [first, last] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
  const step = Math.ceil((last - first) / 6) || 1;
  const parts = last - first <= 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let exponent = first; exponent <= last; exponent += step)
    for (const part of parts) ticks.push(Number(`${part}e${exponent}`));
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

const power = (tick) => (tick >= 1e-3 && tick < 1e4 ? String(tick) : tick.toExponential(0));

const charts = new Set();
document.addEventListener("themechange", () => charts.forEach((chart) => chart.rebuild()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.rebuild()));

/**
 * series: [{label, colour, width, points, alpha, fill, value(v)}]; x: "step", "time" (seconds since the start) or
 * "clock" (Unix seconds); log: vertical axis. show({x, columns, axis, words}) draws; columns as many as series.
 */
export class LineChart {
  constructor(host, { series, log = false, zero = false, empty = "Nothing to show yet." }) {
    this.host = host;
    this.series = series;
    this.log = log;
    this.zero = zero;
    this.axis = "step";
    this.data = null;
    this.plot = null;
    this.values = series.map(() => h("b"));
    this.legend = h("div", { class: "legend", "aria-hidden": "true" }, series.map((one, index) =>
      h("span", { class: `key ${one.points ? "dots" : ""}`, style: `--key: var(${one.colour}); --faint: ${one.alpha ? 0.4 : 1}` },
        h("i"), one.label, this.values[index])));
    this.at = h("span", { class: "legend-at" });
    this.legend.append(this.at);
    this.canvas = h("div", { class: "chart-canvas", role: "img", "aria-label": "Chart, no data yet" });
    this.empty = h("p", { class: "empty" }, empty);
    host.append(this.legend, this.canvas, this.empty);
    charts.add(this);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  show({ x, columns, axis, words }) {
    const changed = axis !== this.axis;
    this.axis = axis;
    const any = columns.some((column) => column.some((value) => value !== null));
    this.empty.hidden = any;
    this.canvas.classList.toggle("is-empty", !any);
    setAttribute(this.canvas, "aria-label", words);
    this.data = [x, ...columns];
    columns.forEach((column, i) => (this.values[i].parentElement.hidden = column.every((value) => value === null)));
    if (!any) return;
    if (!this.plot || changed) this.rebuild();
    else this.plot.setData(this.data);
    this.tell(null);
  }

  resize() {
    const width = this.canvas.clientWidth;
    // What was hidden when its figures came is drawn when it is seen.
    if (!this.plot && width) this.rebuild();
    else if (width) this.plot.setSize({ width, height: this.canvas.clientHeight });
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (this.data && this.canvas.clientWidth) this.plot = new uPlot(this.options(), this.data, this.canvas);
  }

  /** Values under the pointer, or the newest ones. */
  tell(index) {
    this.values.forEach((value, i) => {
      const column = this.data[i + 1];
      // A figure that stopped coming is not the present one; sparse ones are as new as their last point.
      const newest = this.series[i].points ? column : column.slice(-RECENT);
      const found = index === null ? newest.findLast((v) => v !== null) : column[index];
      setText(value, (this.series[i].value ?? short)(found ?? null));
    });
    const x = index === null ? null : this.data[0][index];
    setText(this.at, x === null || x === undefined ? "" : this.label(x));
  }

  label(x) {
    if (this.axis === "step") return `step ${x}`;
    if (this.axis === "clock") return new Date(x * 1000).toLocaleTimeString("en-GB");
    return duration(x);
  }

  options() {
    const ink = colour("--ink-3");
    const line = colour("--line");
    const axis = {
      stroke: ink, font: `11px ${getComputedStyle(document.body).fontFamily}`,
      grid: { stroke: line, width: 1 }, ticks: { show: false }, gap: 6,
    };
    const span = (x) => (this.axis === "step" ? short(x) : duration(x).replace(/ (\d+) s$/, (all, s) => (s === "0" ? "" : all)));
    const format = this.axis === "clock"
      ? { values: (_, ticks, __, ___, step) => ticks.map((tick) => timeOfDay(tick).slice(0, step < 60 ? 8 : 5)) }
      : { values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : span(tick))) };
    const value = this.log
      ? { filter: (_, ticks) => ticks, splits: (_, __, low, high) => decades(low, high), values: (_, ticks) => ticks.map(power) }
      : { values: (_, ticks) => ticks.map((tick) => (Math.abs(tick) >= 1000 ? short(tick) : String(+tick.toFixed(6)))) };
    return {
      width: this.canvas.clientWidth,
      height: this.canvas.clientHeight,
      padding: [10, this.axis === "clock" ? 26 : 14, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, y: false },
      scales: {
        x: { time: this.axis === "clock" },
        y: this.log ? { distr: 3 } : { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 30, space: 70, ...format },
        { ...axis, size: 52, space: 34, ...value },
      ],
      series: [{}, ...this.series.map((one) => this.style(one))],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.left >= 0 ? plot.cursor.idx : null)] },
    };
  }

  style(one) {
    const stroke = colour(one.colour);
    return {
      label: one.label, stroke: one.alpha ? fade(stroke, one.alpha) : stroke, width: one.width ?? 1.75, spanGaps: true,
      fill: one.fill ? fade(stroke, 0.1) : undefined,
      points: one.points ? { show: true, size: 6, fill: stroke, stroke: colour("--surface"), width: 1.5 } : { show: false },
    };
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    const bottom = this.zero ? Math.min(0, low) : low;
    if (high === 0 && bottom === 0) return [0, 1];
    const room = Math.max(high - bottom, Math.abs(high) * 0.02, 1e-6) * 0.08;
    return [bottom === 0 ? 0 : bottom - room, high + room];
  }
}
