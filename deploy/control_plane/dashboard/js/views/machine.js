// What a run uses of its machines, service by service, how long its queues are, and the alerts that fired.

import { read, refused } from "../data/api.js";
import { chosen, of } from "../data/archive.js";
import { byId, h, setText } from "../elements/dom.js";
import { duration, plural } from "../elements/format.js";
import { csv, GridChart, save } from "../elements/grid-chart.js";
import { register } from "../data/route.js";

const EVERY_MS = 10000;
const CHARTS = [
  ["processors", "cpu", "Processors in use by a service and its children; 1 is one of them.", 1],
  ["memory, GiB", "memory_bytes", "Resident memory; what processes share counts in each of them.", 2 ** 30],
  ["GPU memory, GiB", "gpu_memory_bytes", "As nvidia-smi tells it, where there is one.", 2 ** 30],
  ["queues", "queues", "Entries that wait or are in work, by stream; of scored those that wait. A queue that grows is before the bottleneck.", 1],
];
const charts = new Map();
let timer = 0;
let opened = 0;
let found = null;
let zoomed = false;

const when = (time) => new Date(time * 1000).toLocaleString("en-GB");

const actions = {
  zoom: () => (zoomed = true),
  zoomed: () => zoomed,
  csv(name) {
    const [, field, , unit] = CHARTS.find(([title]) => title === name);
    const names = Object.keys(found[field]);
    save(csv([["time", ...names], ...found.time.map((time, at) => [time, ...names.map((one) => scaled(found[field][one][at], unit))])]), `${field}.csv`);
  },
};
const scaled = (value, unit) => (value === null ? null : value / unit);

function draw() {
  const begin = found.time[0] ?? 0;
  const names = [...new Set(CHARTS.filter(([, field]) => field !== "queues").flatMap(([, field]) => Object.keys(found[field])))].sort();
  for (const [title, field, about, unit] of CHARTS) {
    const columns = found[field];
    if (!charts.has(title)) {
      if (!Object.keys(columns).length) continue;
      charts.set(title, new GridChart(title, about, actions));
      byId("machine-charts").append(charts.get(title).element);
    }
    const own = field === "queues" ? Object.keys(columns) : names;
    const lines = Object.entries(columns).map(([name, values]) => ({
      run: name, index: own.indexOf(name), x: found.time.map((time) => time - begin), values: values.map((value) => scaled(value, unit)),
    }));
    charts.get(title).show(lines, { axis: "time", weight: 0, log: false });
  }
  setText(byId("machine-note"), found.time.length ? `${duration(found.time.at(-1) - begin)} from ${when(begin)}`
    : "Nothing is measured yet: a supervisor or a control plane writes it into the run's folder.");
}

function alerts(all) {
  const open = all.filter((one) => one.over === null).length;
  setText(byId("alert-note"), all.length ? `${plural(all.length, "alert")}, ${open} not over` : "");
  byId("alert-list").replaceChildren(...all.map((one) => h("li", { class: "alert", "data-level": one.over === null ? one.level : "over" },
    h("strong", null, one.name.replaceAll("_", " ")), h("span", null, one.text),
    h("span", { class: "aside" }, `${when(one.fired)}, ${one.over === null ? "not over" : `for ${duration(one.over - one.fired)}`}`))));
  if (!all.length) byId("alert-list").replaceChildren(h("li", { class: "empty" }, "No alert has fired."));
}

async function load(mine) {
  const [run] = chosen();
  if (run === undefined) return setText(byId("machine-note"), "No run is here yet.");
  try {
    const [resources, fired] = await Promise.all([read(of(run, "resources?points=600")), read(of(run, "alerts?order=newest"))]);
    if (mine !== opened) return;
    found = resources;
    draw();
    alerts(fired.alerts);
  } catch (error) {
    setText(byId("machine-note"), refused(error).message);
  }
}

async function show() {
  const mine = ++opened;
  clearInterval(timer);
  for (const chart of charts.values()) chart.remove();
  charts.clear();
  zoomed = false;
  await load(mine);
  if (mine === opened) timer = setInterval(() => !document.hidden && load(mine), EVERY_MS);
}

export function start() {
  register("machine", show, () => {
    opened++;
    clearInterval(timer);
  });
  byId("machine-reset").addEventListener("click", () => {
    zoomed = false;
    for (const chart of charts.values()) chart.resetZoom();
  });
}
