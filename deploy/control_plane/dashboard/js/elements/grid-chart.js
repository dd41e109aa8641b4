// One metric of several runs as a chart of the grid: smoothed over its faint values, with a cursor that all charts share.

import { colour } from "./charts.js";
import { h, setAttribute, setText } from "./dom.js";
import { TIME_STEPS, short, small, timeTicks } from "./format.js";

const COLOURS = ["--blue", "--orange", "--green", "--violet", "--bad"];
const SYNC = "grid";

/** Colour and dashes of the run at this place: five colours, then the same with dashes. */
export const look = (index) => ({ colour: COLOURS[index % COLOURS.length], dash: index < COLOURS.length ? undefined : [6, 3] });

/** Exponential moving mean with this weight of what came before, 0 to 1; without the pull of the first value. */
export function ema(values, weight) {
  let mean = 0;
  let known = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

export const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size >= 1e4 ? short(value) : size !== 0 && size < 1e-2 ? small(value) : String(+value.toPrecision(4));
};

/** Of a line that is 0 throughout 0 to 1, where uPlot would take 0 to 100; else as uPlot does. */
const rangeOf = (_, low, high) => (low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));

/** The value at this place, or the nearest one of a line that has points on both sides but none here. */
export function near(xs, values, at) {
  const known = (place) => values[place] !== null && values[place] !== undefined;
  let [left, right] = [at, at];
  while (left >= 0 && !known(left)) left--;
  while (right < values.length && !known(right)) right++;
  if (left < 0 || right >= values.length) return null;
  return values[xs[at] - xs[left] <= xs[right] - xs[at] ? left : right];
}

export class GridChart {
  /** about: what the metric is, in words. */
  constructor(name, about, onLook) {
    this.name = name;
    this.legend = h("div", { class: "grid-legend" });
    this.canvas = h("div", { class: "grid-canvas", role: "img", "aria-label": `${name}, not loaded yet` });
    this.onLook = onLook;
    this.plot = null;
    this.pin = onLook.pin ? h("button", { type: "button", class: "grid-button", "aria-label": `Pin ${name} to the top`, onclick: () => onLook.pin(name) }, "Pin") : null;
    this.element = h("section", { class: "panel grid-card", "data-metric": name, "aria-label": name },
      h("div", { class: "grid-head" }, h("h3", { title: name }, name),
        h("span", { class: "grid-do" },
          this.pin,
          h("button", { type: "button", class: "grid-button", "aria-label": `Save ${name} as a picture`, onclick: () => this.savePicture() }, "PNG"),
          h("button", { type: "button", class: "grid-button", "aria-label": `Save ${name} as CSV`, onclick: () => onLook.csv(name) }, "CSV"))),
      about ? h("p", { class: "grid-about", title: about }, about) : null, this.legend, this.canvas);
    this.observer = new ResizeObserver(() => {
      const width = this.canvas.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.canvas.clientHeight });
    });
    this.observer.observe(this.canvas);
  }

  /** lines: [{run, index, x, values}]; settings: {axis, weight, log}. */
  show(lines, settings) {
    const { axis, weight, log } = settings;
    if (this.pin) setAttribute(this.pin, "aria-pressed", this.onLook.isPinned(this.name));
    const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = [];
    const series = [{}];
    this.lines = lines.filter((line) => line.values.some((value) => value !== null));
    for (const line of this.lines) {
      const { colour: name, dash } = look(line.index);
      const stroke = colour(name);
      const raw = positive(line.values);
      if (weight > 0) {
        tables.push([line.x, raw]);
        series.push({ label: `${line.run} (raw)`, stroke: stroke.replace(/^rgba?\(([^)]+)\)$/, "rgba($1, 0.25)").replace(/, 1, 0.25/, ", 0.25"), width: 1, spanGaps: true, points: { show: false } });
      }
      tables.push([line.x, weight > 0 ? ema(raw, weight) : raw]);
      series.push({ label: line.run, stroke, width: 1.75, dash, spanGaps: true, points: { show: line.values.filter((v) => v !== null).length < 2 } });
    }
    this.settings = settings;
    this.shown = series.map((one, index) => [one, index]).filter(([one]) => one.label && !one.label.endsWith(" (raw)")).map(([, index]) => index);
    this.legend.replaceChildren(...this.lines.map((line) => h("span", { class: "key", style: `--key: var(${look(line.index).colour})` },
      h("i", { class: look(line.index).dash ? "is-dashed" : null }), this.lines.length > 1 ? line.run : "", h("b", null, number(line.values.findLast((v) => v !== null))))));
    setAttribute(this.canvas, "aria-label", this.lines.length
      ? `${this.name}: ${this.lines.map((line) => `${line.run} ${number(line.values.find((v) => v !== null))} at first, ${number(line.values.findLast((v) => v !== null))} now`).join("; ")}`
      : `${this.name}: no value`);
    const data = tables.length ? uPlot.join(tables) : null;
    const same = this.plot && this.key === JSON.stringify([axis, weight > 0, log, series.map((one) => [one.label, one.stroke])]);
    this.key = JSON.stringify([axis, weight > 0, log, series.map((one) => [one.label, one.stroke])]);
    if (same && data) this.plot.setData(data, !this.onLook.zoomed());
    else {
      this.plot?.destroy();
      this.plot = data && this.canvas.clientWidth ? new uPlot(this.options(series), data, this.canvas) : null;
    }
    this.canvas.classList.toggle("is-nothing", !data);
  }

  options(series) {
    // uPlot takes whole pixels: of a fraction it would scale the digits after the point alone on a sharp display.
    const axis = { stroke: colour("--ink-3"), font: "11px Inter, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, gap: 4 };
    const time = this.settings.axis === "time";
    const words = time ? timeTicks : (ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
    return {
      width: this.canvas.clientWidth, height: this.canvas.clientHeight, padding: [8, 10, 0, 0], legend: { show: false },
      cursor: { sync: { key: SYNC, scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 6 }, y: false },
      scales: { x: { time: false }, y: this.settings.log ? { distr: 3 } : { range: rangeOf } },
      axes: [
        { ...axis, grid: { show: false }, size: 24, space: 60, values: (_, ticks) => words(ticks), ...(time ? { incrs: TIME_STEPS } : {}) },
        { ...axis, size: 50, space: 28, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
      ],
      series,
      hooks: {
        setCursor: [(plot) => this.tell(plot)],
        setSelect: [(plot) => plot.select.width > 0 && this.onLook.zoom()],
      },
    };
  }

  tell(plot) {
    const { idx, left } = plot.cursor;
    const away = left < 0 || idx === null;
    this.shown.forEach((column, index) => {
      const values = plot.data[column];
      const value = away ? values.findLast((v) => v !== null && v !== undefined) : near(plot.data[0], values, idx);
      const label = this.legend.children[index]?.querySelector("b");
      if (label) setText(label, number(value ?? null));
    });
  }

  resetZoom() {
    const xs = this.plot?.data[0];
    if (xs?.length) this.plot.setScale("x", { min: xs[0], max: xs.at(-1) });
  }

  /** The chart with its name and legend, as a PNG. */
  savePicture() {
    if (!this.plot) return;
    const source = this.plot.ctx.canvas;
    const ratio = source.width / this.plot.width;
    const top = 44 * ratio;
    const canvas = h("canvas", { width: source.width, height: source.height + top });
    const pen = canvas.getContext("2d");
    pen.fillStyle = colour("--surface");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = colour("--ink");
    pen.font = `${13 * ratio}px Inter, sans-serif`;
    pen.fillText(this.name, 8 * ratio, 18 * ratio);
    let x = 8 * ratio;
    pen.font = `${11 * ratio}px Inter, sans-serif`;
    for (const line of this.lines) {
      pen.fillStyle = colour(look(line.index).colour);
      pen.fillText(line.run, x, 36 * ratio);
      x += pen.measureText(line.run).width + 14 * ratio;
    }
    pen.drawImage(source, 0, top);
    canvas.toBlob((blob) => save(blob, `${this.name.replaceAll("/", "-")}.png`));
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.element.remove();
  }
}

/** Hand a file to the browser's downloads. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));

/** Rows as CSV. */
export const csv = (rows) => new Blob([rows.map((row) => row.map((cell) => (cell === null || cell === undefined ? "" : quoted(cell))).join(",")).join("\n") + "\n"], { type: "text/csv" });
