// All metrics of the chosen runs as a grid of charts: searched, smoothed, over steps, samples or time, and exported.
// A chart is drawn, and its figures are asked for, when it comes into sight. Pinned charts come first.

import { refused } from "../data/api.js";
import { archive, chosen, figuresOf, headOf, loadNames, loadRuns, loadSeries, refreshSeries } from "../data/archive.js";
import { notice } from "../elements/dialogs.js";
import { byId, h, setAttribute, setText } from "../elements/dom.js";
import { plural } from "../elements/format.js";
import { GridChart, csv, look, save } from "../elements/grid-chart.js";
import { register } from "../data/route.js";

const EVERY_MS = 4000;
const SECTIONS = ["reward", "eval", "episode", "data", "groups", "samples", "train", "staleness", "perf", "time"];
const KEY = "tidemill-grid";
const PINNED = "pinned";
const settings = { axis: "step", weight: 0.6, log: false, pinned: [], folded: [], ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
const charts = new Map();
const seen = new Set();
let zoomed = false;
let timer = 0;
let asking = 0;
let opened = 0;
let busy = false;

const isPinned = (name) => settings.pinned.includes(name);
const section = (name) => (isPinned(name) ? PINNED : name.includes("/") ? name.slice(0, name.indexOf("/")) : "other");
const order = (name) => {
  const at = [PINNED, ...SECTIONS].indexOf(section(name));
  return [at < 0 ? SECTIONS.length + 1 : at, name];
};
/** The first charts of their sections: what most users look for. */
const FIRST = ["reward/mean", "reward/unfiltered_mean", "reward/std", "train/loss", "train/entropy", "train/grad_norm", "time/total_s"];
const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
const compare = (a, b) => order(a)[0] - order(b)[0] || rank(a) - rank(b) || (a < b ? -1 : 1);

/** Seconds of training at each step: a trainer that took over may count from 0. */
function running(values) {
  let before = 0;
  let last = 0;
  return values.map((value) => {
    if (value === null) return before + last;
    if (value < last) before += last;
    last = value;
    return before + value;
  });
}

function total(values) {
  let sum = 0;
  return values.map((value) => (sum += value ?? 0));
}

function line(run, index, name) {
  const { series } = figuresOf(run);
  const found = series[name];
  if (!found) return null;
  const other = { time: ["wall_s", running], samples: ["trajectories", total] }[settings.axis];
  if (!other) return { run, index, x: found.step, values: found.values };
  const [axis, sum] = other;
  const at = new Map(series[axis].step.map((step, place) => [step, place]));
  const xs = sum(series[axis].values);
  const places = found.step.map((step) => at.get(step));
  return {
    run, index, x: places.map((place) => xs[place ?? 0] ?? 0), values: found.values,
  };
}

function draw(name) {
  const chart = charts.get(name);
  if (chart) chart.show(chosen().map((run, index) => line(run, index, name)).filter(Boolean), settings);
}

const drawAll = () => seen.forEach(draw);

/** Ask for the figures of what is in sight, all together. */
async function load() {
  const names = [...seen];
  const number = ++asking;
  try {
    await Promise.all(chosen().map((run) => loadSeries(run, names)));
  } catch (error) {
    notice(refused(error).message, "bad");
    return;
  }
  if (number === asking) names.forEach(draw);
}

let soon = 0;
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const name = target.dataset.metric;
    if (isIntersecting) seen.add(name);
    else seen.delete(name);
  }
  clearTimeout(soon);
  soon = setTimeout(load, 60);
}, { rootMargin: "300px" });

async function saveCsv(only) {
  const runs = chosen();
  const names = only ? [only] : allNames().filter(fits);
  await Promise.all(runs.map((run) => loadSeries(run, names)));
  const rows = [["run", "step", ...names]];
  for (const run of runs) {
    const { series } = figuresOf(run);
    const columns = names.map((name) => new Map(series[name].step.map((step, place) => [step, series[name].values[place]])));
    for (const step of series.wall_s.step) rows.push([run, step, ...columns.map((column) => column.get(step))]);
  }
  save(csv(rows), `${only ? only.replaceAll("/", "-") : "metrics"}.csv`);
}

/** The list with the item, or without it if it has it. */
const toggled = (list, item) => (list.includes(item) ? list.filter((one) => one !== item) : [...list, item]);

const onLook = {
  csv: saveCsv,
  isPinned,
  pin: (name) => {
    set({ pinned: toggled(settings.pinned, name) });
    layout();
    // In a folded section it has no chart.
    charts.get(name)?.pin.focus();
  },
  zoomed: () => zoomed,
  zoom: () => {
    zoomed = true;
    byId("grid-reset").disabled = false;
  },
};

const allNames = () => [...new Set(chosen().flatMap((run) => figuresOf(run).names))].filter((name) => name !== "step").sort(compare);
const fits = (name) => byId("grid-search").value.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));

const heading = (title, count) => h("h2", { class: "grid-section" },
  h("button", { type: "button", class: "grid-fold", "aria-expanded": !isFolded(title), onclick: () => fold(title) }, title, h("small", null, count)));

/** A search looks into folded sections, too. */
const isFolded = (title) => settings.folded.includes(title) && !byId("grid-search").value;

function fold(title) {
  set({ folded: toggled(settings.folded, title) });
  layout();
}

/** Make the cards: a heading for each section, a card for each metric that fits. */
function layout() {
  const found = allNames().filter(fits);
  const names = found.filter((name) => !isFolded(section(name)));
  for (const [name, chart] of charts) {
    if (names.includes(name)) continue;
    sight.unobserve(chart.element);
    chart.remove();
    charts.delete(name);
    seen.delete(name);
  }
  const parts = [];
  let before = null;
  for (const name of found) {
    const title = section(name);
    if (title !== before) parts.push(heading(title, found.filter((one) => section(one) === title).length));
    before = title;
    if (isFolded(title)) continue;
    if (!charts.has(name)) {
      const about = chosen().map((run) => figuresOf(run).about[name]).find(Boolean);
      charts.set(name, new GridChart(name, about, onLook));
    }
    parts.push(charts.get(name).element);
  }
  byId("grid").replaceChildren(...parts);
  for (const name of names) sight.observe(charts.get(name).element);
  setText(byId("grid-note"), found.length ? plural(found.length, "metric") : chosen().length ? "No metric fits." : "No run is here yet.");
}

function showRuns() {
  byId("grid-runs").replaceChildren(...chosen().map((run, index) => h("span", { class: "key", style: `--key: var(${look(index).colour})` }, h("i"), run)));
}

async function show() {
  const mine = ++opened;
  clearInterval(timer);
  showRuns();
  try {
    await Promise.all(chosen().map(loadNames));
  } catch (error) {
    setText(byId("grid-note"), refused(error).message);
    return;
  }
  layout();
  await load();
  // Another view may have been opened meanwhile.
  if (mine === opened) timer = setInterval(refresh, EVERY_MS);
}

async function refresh() {
  if (document.hidden || busy) return;
  busy = true;
  try {
    const going = chosen().filter((run) => run === archive.live || headOf(run)?.state === "running");
    const news = await Promise.all(going.map(refreshSeries));
    if (news.some(Boolean)) drawAll();
    if (going.length && news.some(Boolean) && allNames().some((name) => fits(name) && !charts.has(name))) layout();
    if (archive.live === null && going.length) await loadRuns();
  } catch (error) {
    refused(error);
  } finally {
    busy = false;
  }
}

function set(change) {
  Object.assign(settings, change);
  localStorage.setItem(KEY, JSON.stringify(settings));
  tell();
  drawAll();
}

function tell() {
  for (const button of byId("grid-axis").children) setAttribute(button, "aria-pressed", button.dataset.axis === settings.axis);
  byId("grid-log").checked = settings.log;
  byId("grid-smooth").value = settings.weight;
  setText(byId("grid-smooth-value"), Number(settings.weight).toFixed(2));
}

function reset() {
  zoomed = false;
  byId("grid-reset").disabled = true;
  for (const chart of charts.values()) chart.resetZoom();
}

export function start() {
  register("metrics", show, () => {
    opened++;
    clearInterval(timer);
  });
  byId("grid-search").addEventListener("input", layout);
  byId("grid-axis").addEventListener("click", (event) => {
    if (!event.target.dataset.axis) return;
    reset();
    set({ axis: event.target.dataset.axis });
  });
  byId("grid-smooth").addEventListener("input", (event) => set({ weight: Number(event.target.value) }));
  byId("grid-log").addEventListener("change", (event) => set({ log: event.target.checked }));
  byId("grid-reset").addEventListener("click", reset);
  byId("grid-csv").addEventListener("click", () => saveCsv());
  byId("grid").addEventListener("dblclick", reset);
  document.addEventListener("themechange", drawAll);
  tell();
}
