// Evaluations on held-out prompts: a table of versions, and a table of prompts by version with the worst first.

import { read, refused } from "../data/api.js";
import { chosen, of } from "../data/archive.js";
import { open } from "../elements/dialogs.js";
import { byId, h, setText } from "../elements/dom.js";
import { count, duration, figure, plural } from "../elements/format.js";
import { csv, save } from "../elements/grid-chart.js";
import { go, register } from "../data/route.js";
import { sideBySide } from "../elements/samples.js";

/** Versions beside each other in the table of prompts. */
const COLUMNS = 6;
const PROMPTS = 1000;
const PAGE = 100;
let rows = PAGE;
let table = null;
let opened = 0;

async function show() {
  const mine = ++opened;
  const [run] = chosen();
  const host = byId("evaluation-list");
  if (run === undefined) return host.replaceChildren(h("p", { class: "empty" }, "No run is here yet."));
  let found;
  try {
    found = (await read(of(run, "evaluations"))).evaluations;
  } catch (error) {
    refused(error);
    if (mine === opened) host.replaceChildren(h("p", { class: "problem" }, error.message));
    return;
  }
  // Another run may have been chosen meanwhile.
  if (mine !== opened) return;
  host.replaceChildren(found.length ? versions(found) : h("p", { class: "empty" }, "No evaluation is complete yet."));
  setText(byId("evaluation-note"), found.length ? plural(found.length, "evaluation") : "");
  await prompts(run, found.filter((one) => one.prompts).slice(-COLUMNS).reverse());
}

/** Metrics of each dataset that are numbers, under their names. */
function extras(one) {
  const flat = {};
  for (const [label, of] of Object.entries(one.datasets))
    for (const [name, value] of Object.entries(of ?? {})) if (typeof value === "number" && !["n", "scored", "failed", "mean", "length"].includes(name)) flat[`${label} ${name}`] = value;
    else if (name === "mean" && Object.keys(one.datasets).length > 1 && value !== null) flat[`${label} reward`] = value;
  return flat;
}

function versions(found) {
  const first = found[0].version === 0 ? found[0].mean : null;
  const names = [...new Set(found.flatMap((one) => Object.keys(extras(one))))].slice(0, 12);
  const cells = (one) => {
    const more = extras(one);
    const change = first !== null && one.mean !== null && one.version ? `${one.mean >= first ? "+" : ""}${figure(one.mean - first)}` : "–";
    return [count(one.version), figure(one.mean), change, ...names.map((name) => figure(more[name])), count(one.length),
      `${count(one.scored)} of ${count(one.n)}`, one.off_version ? count(one.off_version) : "–", duration(one.wall_s)];
  };
  const heads = ["Version", "Mean reward", "Since version 0", ...names, "Tokens", "Scored", "Other weights", "After"];
  return h("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table of evaluations by version" },
    h("table", { class: "table" },
      h("thead", null, h("tr", null, heads.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, [...found].reverse().map((one) => h("tr", null, cells(one).map((cell, index) => h(index ? "td" : "th", index ? null : { scope: "row" }, cell)))))));
}

/** Prompts of the newest versions whose samples are kept, the newest first: rows are prompts, its worst first. */
async function prompts(run, kept) {
  const host = byId("prompt-list");
  byId("prompt-panel").hidden = !kept.length;
  if (!kept.length) return;
  const text = byId("prompt-search").value.trim();
  const query = new URLSearchParams({ limit: PROMPTS, sort: "worst", ...(text ? { text } : {}) });
  const mine = opened;
  const found = await Promise.all(kept.map((one) => read(of(run, `evaluations/${one.version}?${query}`))));
  if (mine !== opened) return;
  const lines = new Map();
  found.forEach((evaluation, column) => {
    for (const one of evaluation.prompts) {
      const key = `${one.dataset} ${one.index}`;
      if (!lines.has(key)) lines.set(key, { ...one, cells: kept.map(() => null) });
      lines.get(key).cells[column] = one;
    }
  });
  const mean = (line) => line.cells[0]?.mean ?? Infinity;
  table = { run, kept, lines: [...lines.values()].sort((a, b) => mean(a) - mean(b) || a.index - b.index) };
  setText(byId("prompt-note"), `${plural(table.lines.length, "prompt")}, the worst of version ${kept[0].version} first; choose a reward to read the samples`);
  host.replaceChildren(promptTable());
}

function promptTable() {
  const { kept, lines } = table;
  return h("div", null,
    h("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table of prompts by version" }, h("table", { class: "table" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Prompt"), kept.map((one) => h("th", { scope: "col" }, `v${one.version}`)))),
      h("tbody", null, lines.slice(0, rows).map((line) => h("tr", null,
        h("th", { scope: "row", class: "prompt-cell" }, h("span", null, line.dataset ? `${line.dataset} ` : "", `${line.index}`), line.prompt.slice(0, 160)),
        line.cells.map((cell, column) => h("td", null, cell === null ? "–" : h("button", {
          type: "button", class: "cell", style: `--share: ${Math.max(0, Math.min(1, cell.mean ?? 0))}`,
          "aria-label": `Prompt ${line.index}, version ${kept[column].version}: ${figure(cell.mean)}`, onclick: () => samples(line, column),
        }, figure(cell.mean, 2))))))))),
    rows < lines.length ? h("button", { type: "button", class: "button more", onclick: () => {
      rows += PAGE;
      byId("prompt-list").replaceChildren(promptTable());
    } }, "Show more") : "");
}

function samples(line, column) {
  const cell = line.cells[column];
  open(`Prompt ${line.index}, version ${table.kept[column].version}`, h("div", { class: "dialog-body" },
    h("pre", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, cell.prompt),
    Object.keys(cell.data).length ? h("dl", { class: "facts" }, Object.entries(cell.data).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))) : null,
    sideBySide(cell.samples)), { wide: true });
}

function exportPrompts() {
  if (!table) return;
  const head = ["dataset", "index", "prompt", ...table.kept.map((one) => `version ${one.version}`)];
  save(csv([head, ...table.lines.map((line) => [line.dataset, line.index, line.prompt, ...line.cells.map((cell) => cell?.mean)])]), `${table.run}-evaluations.csv`);
}

export function start() {
  register("evaluations", show);
  let timer = 0;
  byId("prompt-search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(show, 300);
  });
  byId("prompt-csv").addEventListener("click", exportPrompts);
  byId("evaluation-curve").addEventListener("click", () => {
    byId("grid-search").value = "eval/";
    go("metrics");
  });
}
