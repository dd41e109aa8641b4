// The runs of a folder, finished and running: opened one by one, or several compared.

import { refused } from "../data/api.js";
import { archive, chosen, headOf, loadRuns } from "../data/archive.js";
import { byId, h, setText } from "../elements/dom.js";
import { count, duration, figure, plural, share } from "../elements/format.js";
import { go, link, register } from "../data/route.js";

const EVERY_MS = 5000;
const picked = new Set();
let timer = 0;

const when = (time) => new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

/** What the runs are sorted by, by the head of its column. */
const COLUMNS = new Map([
  ["Run", (run) => run.name], ["State", (run) => run.state], ["Step", (run) => run.step], ["Reward", (run) => run.reward],
  ["Held-out", (run) => run.accuracy ?? run.heldout_reward], ["Time", (run) => run.wall_s], ["Last change", (run) => run.updated], ["Model", (run) => run.model],
]);
const order = { by: null, falls: false };
const missing = (value) => Number(value === null);
const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);

function head(name) {
  const chosen = order.by === name;
  return h("th", { scope: "col", "aria-sort": chosen ? (order.falls ? "descending" : "ascending") : null },
    h("button", { type: "button", class: "sort", onclick: () => {
      Object.assign(order, { by: name, falls: chosen && !order.falls });
      list();
    } }, name));
}

function row(run) {
  const pick = h("input", { type: "checkbox", checked: picked.has(run.name), "aria-label": `Compare ${run.name}`, onchange: (event) => {
    if (event.target.checked) picked.add(run.name);
    else picked.delete(run.name);
    tell();
  } });
  const [before, after, shown] = run.accuracy === null
    ? [run.heldout_reward_before, run.heldout_reward, figure] : [run.accuracy_before, run.accuracy, share];
  return h("tr", { "data-run": run.name },
    h("td", null, pick),
    h("th", { scope: "row" }, h("a", { href: link("metrics", [], [run.name]) }, run.name),
      run.tags.map((tag) => h("span", { class: "run-tag" }, tag)), run.notes && h("p", { class: "aside run-notes" }, run.notes)),
    h("td", null, h("span", { class: "state", "data-state": run.state, title: run.cause || null }, h("i", { "aria-hidden": "true" }), run.state)),
    h("td", null, `${count(run.step)}${run.steps ? ` of ${count(run.steps)}` : ""}`),
    h("td", null, figure(run.reward)), h("td", null, `${before === null ? "" : `${shown(before)} → `}${shown(after)}`),
    h("td", null, duration(run.wall_s)), h("td", null, when(run.updated)), h("td", null, run.model ?? "–"),
    h("td", null, run.live && run.name !== archive.live && run.state === "running" ? h("a", { href: run.live }, "live page") : run.name === archive.live ? "this page" : ""));
}

function list() {
  const text = byId("run-search").value.toLowerCase();
  const focused = document.activeElement?.closest("#run-list .sort")?.textContent;
  const found = archive.runs.filter((run) => [run.name, run.model, run.state, run.notes, ...run.tags].some((part) => part?.toLowerCase().includes(text)));
  const value = COLUMNS.get(order.by);
  // What a run does not have comes last in either direction; an equal value keeps the order of the newest change.
  if (value) found.sort((one, other) => missing(value(one)) - missing(value(other)) || (order.falls ? -1 : 1) * compare(value(one), value(other)));
  byId("run-list").replaceChildren(found.length
    ? h("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table of runs" }, h("table", { class: "table" },
      h("thead", null, h("tr", null, h("td", null, h("span", { class: "hidden" }, "Compare")), [...COLUMNS.keys()].map(head), h("td", null, h("span", { class: "hidden" }, "Live")))),
      h("tbody", null, found.map(row))))
    : h("p", { class: "empty" }, archive.runs.length ? "No run fits." : "No run has been here yet."));
  if (focused) [...byId("run-list").querySelectorAll(".sort")].find((button) => button.textContent === focused)?.focus();
  setText(byId("run-note"), plural(found.length, "run"));
  tell();
}

function tell() {
  byId("run-compare").disabled = picked.size < 2;
  setText(byId("run-compare"), picked.size < 2 ? "Compare" : `Compare ${picked.size} runs`);
}

async function refresh() {
  if (document.hidden || document.activeElement?.closest("#run-list tbody")) return;
  try {
    const before = JSON.stringify(archive.runs);
    await loadRuns();
    if (JSON.stringify(archive.runs) !== before) list();
  } catch (error) {
    setText(byId("run-note"), refused(error).message);
  }
}

/** The strip under the bar: which run the views are of, where there are several. */
export function showChoice() {
  const host = byId("which-run");
  const names = chosen();
  host.hidden = archive.runs.length < 2 && archive.live !== null;
  host.replaceChildren(h("label", null, h("span", { class: "hidden" }, "Run"), h("select", { onchange: (event) => {
    const { view } = { view: location.hash.replace(/^#\/?/, "").split(/[/?]/)[0] };
    go(view || "metrics", [], [event.target.value]);
  } }, archive.runs.map((run) => h("option", { value: run.name, selected: run.name === names[0] }, run.name)))),
  names.length > 1 ? h("span", { class: "aside" }, `compared with ${names.slice(1).join(", ")}`) : "");
  const head = headOf(names[0]);
  if (archive.live === null) {
    setText(byId("run"), head ? head.name : "runs");
    document.title = `${head ? `${head.name} · ` : ""}runs · Tidemill`;
  }
}

export function start() {
  register("runs", () => {
    for (const run of chosen().length > 1 ? chosen() : []) picked.add(run);
    list();
    clearInterval(timer);
    timer = setInterval(refresh, EVERY_MS);
  }, () => clearInterval(timer));
  byId("run-search").addEventListener("input", list);
  byId("run-compare").addEventListener("click", () => go("metrics", [], archive.runs.map((run) => run.name).filter((name) => picked.has(name)).reverse()));
  window.addEventListener("hashchange", showChoice);
}

