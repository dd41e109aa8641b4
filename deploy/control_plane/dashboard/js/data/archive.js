// Runs as their folders show them: the list, those that are looked at, and the figures of their steps.

import { read } from "./api.js";
import { place } from "./route.js";

export const archive = { runs: [], live: null, playground: false, chat: false };

/** Load all runs; the one that changed last comes first. */
export async function loadRuns() {
  const runs = [];
  let found = { next: "" };
  while (found.next !== null) {
    found = await read(`v1/runs?${new URLSearchParams(found.next ? { cursor: found.next } : {})}`);
    runs.push(...found.runs);
  }
  archive.playground = found.playground;
  archive.chat = found.chat;
  archive.runs = runs.sort((one, other) => other.updated - one.updated);
  archive.live = found.live;
}

/** Path of a resource of a run. */
export const of = (run, rest) => `v1/runs/${encodeURIComponent(run)}/${rest}`;

/** Names of the runs that are looked at, the first one alone in most views; the watched or newest one by default. */
export function chosen() {
  const known = new Set(archive.runs.map((run) => run.name));
  const wanted = place().query.getAll("run").filter((run) => known.has(run));
  const first = archive.live ?? archive.runs[0]?.name;
  return wanted.length ? wanted : first === undefined ? [] : [first];
}

export const headOf = (name) => archive.runs.find((run) => run.name === name);

const MOST = 10000;
const AT_ONCE = 60;
const ALWAYS = ["wall_s", "trajectories"];
/** By run: {names, about, series: {name: {step, values}}}. */
const figures = new Map();

const empty = () => ({ names: [], about: {}, series: {} });
export const figuresOf = (run) => figures.get(run) ?? empty();

const query = (names, after) => new URLSearchParams([["limit", MOST], ...(after < 0 ? [] : [["cursor", after]]), ...names.map((name) => ["name", name])]);

/** Load series of a run that are not here yet. */
export async function loadSeries(run, wanted) {
  const missing = [...ALWAYS, ...wanted].filter((name) => !figuresOf(run).series[name]);
  await inParts(missing, async (names) => keep(run, await read(of(run, `metrics?${query(names, -1)}`)), names, false));
}

/** An address has room for so many names only. */
async function inParts(names, ask) {
  for (let first = 0; first < names.length; first += AT_ONCE) await ask(names.slice(first, first + AT_ONCE));
}

/** Ask for what came since, of the series that are here. */
export async function refreshSeries(run) {
  const { series } = figuresOf(run);
  const names = Object.keys(series);
  if (!names.length) return false;
  const lasts = names.map((name) => series[name].step.at(-1) ?? -1);
  let news = false;
  await inParts(names, async (part) => {
    const found = await read(of(run, `metrics?${query(part, Math.min(...lasts))}`));
    keep(run, found, part, true);
    news ||= found.step.length > 0;
  });
  return news;
}

function keep(run, found, names, append) {
  const known = figures.get(run) ?? empty();
  figures.set(run, known);
  known.names = found.names;
  known.about = found.about;
  for (const name of names) {
    const values = found.series[name] ?? found.step.map(() => null);
    const old = append ? known.series[name] : null;
    if (!old) {
      known.series[name] = { step: found.step, values };
      continue;
    }
    const first = found.step.findIndex((step) => step > (old.step.at(-1) ?? -1));
    if (first < 0) continue;
    known.series[name] = { step: old.step.concat(found.step.slice(first)), values: old.values.concat(values.slice(first)) };
  }
}

/** Names of all series of a run. */
export async function loadNames(run) {
  const found = await read(of(run, "metrics?limit=1&name=wall_s"));
  const known = figures.get(run) ?? empty();
  figures.set(run, Object.assign(known, { names: found.names, about: found.about }));
}
