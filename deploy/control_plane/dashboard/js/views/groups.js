// Prompt groups that are kept of a run's steps: searched and sorted, and one with its samples side by side.

import { read, refused } from "../data/api.js";
import { chosen, of } from "../data/archive.js";
import { byId, h, setText } from "../elements/dom.js";
import { count, figure, percent, plural } from "../elements/format.js";
import { csv, save } from "../elements/grid-chart.js";
import { pictures } from "../elements/pictures.js";
import { go, link, register } from "../data/route.js";
import { sideBySide } from "../elements/samples.js";
import { traces } from "../elements/trace.js";

const PAGE = 50;
const MOST = 1000;
const PAUSE_MS = 300;
let timer = 0;
let asked = 0;
let opened = 0;
let shown = [];
let more = null;

function query(cursor, limit = PAGE) {
  const wanted = new URLSearchParams({ limit, ...(cursor === null ? {} : { cursor }) });
  for (const [name, value] of new FormData(byId("group-search"))) if (value.trim() !== "") wanted.set(name, value.trim());
  return wanted;
}

async function search(cursor = null) {
  const [run] = chosen();
  const number = ++asked;
  if (run === undefined) return setText(byId("group-note"), "No run is here yet.");
  try {
    const found = await read(of(run, `groups?${query(cursor)}`));
    if (number !== asked) return;
    shown = cursor === null ? found.groups : shown.concat(found.groups);
    more = found.next;
    setText(byId("group-note"), `${plural(found.total, "group")} of ${count(found.kept)} that are kept`);
    list(found.kept);
    if (cursor === null) charts(found.histograms);
  } catch (error) {
    setText(byId("group-note"), refused(error).message);
  }
}

function list(kept) {
  byId("group-list").replaceChildren(shown.length
    ? h("ul", { class: "groups" }, shown.map(row))
    : h("p", { class: "empty" }, kept ? "None fits." : "None is kept yet: of each step trainer.log_groups are."),
  more === null ? "" : h("button", { type: "button", class: "button more", onclick: () => search(more) }, "Show more"));
}

function row(one) {
  return h("li", null, h("a", { class: "group", href: link("groups", [one.step, one.task_id]), "aria-label": `Group of task ${one.task_id} in step ${one.step}, mean reward ${figure(one.mean)}` },
    h("span", { class: "group-id" }, h("b", null, `step ${count(one.step)}`), h("span", null, `prompt ${one.task_id}`)),
    h("span", { class: "group-reward" }, h("b", null, figure(one.mean)), one.min === one.max ? null : h("span", null, `${figure(one.min, 2)} to ${figure(one.max, 2)}`)),
    h("span", { class: "group-text" }, one.prompt),
    h("span", { class: "group-facts" }, h("span", null, `${plural(one.n, "sample")} · ${plural(one.tokens, "token")}`),
      h("span", null, one.truncated ? `${plural(one.truncated, "sample")} cut` : "none cut"))));
}

const TITLES = { solve_rate: "Prompts by mean reward", reward: "Samples by reward" };

/** How many prompts have which mean reward, that is solve rate; how many samples which reward, and which of each term. */
function charts(histograms) {
  // With one term the reward says the same.
  const wanted = histograms.length === 3 ? histograms.slice(0, 2) : histograms;
  byId("group-rates").replaceChildren(...wanted.map(({ name, low, high, counts }) => {
    const [most, total] = [Math.max(1, ...counts), counts.reduce((sum, number) => sum + number, 0)];
    const at = (index, places) => figure(low + (index * (high - low)) / counts.length, places);
    const title = TITLES[name] ?? `Samples by ${name}`;
    return h("div", null,
      h("h3", null, title),
      h("div", { class: "rates", role: "img", "aria-label": `${title}, from ${counts.map((number, index) => `${at(index, 1)}: ${number}`).join(", ")}` },
        counts.map((number, index) => h("span", { style: `--share: ${number / most}`, title: `${count(number)} (${percent(number / (total || 1))}) from ${at(index, 2)}` }, h("i")))),
      h("p", { class: "aside" }, total ? `${at(0, 1)} to ${at(counts.length, 1)}, ${plural(total, name === "solve_rate" ? "group" : "sample")}` : "no reward yet"));
  }));
}

async function exportGroups() {
  const [run] = chosen();
  const found = await read(of(run, `groups?${query(null, MOST)}`));
  const rows = [["run", "step", "version", "task_id", "n", "mean", "min", "max", "std", "tokens", "truncated", "prompt"]];
  for (const one of found.groups) rows.push([run, ...rows[0].slice(1).map((name) => one[name])]);
  save(csv(rows), `${run}-groups.csv`);
}

/** Show what is made of an answer in the place of the list, or why it was refused. */
async function open(reading, draw) {
  const mine = ++opened;
  const host = byId("group-detail");
  let parts;
  try {
    parts = draw(await reading);
  } catch (error) {
    parts = [h("p", { class: "problem" }, refused(error).message), back()];
  }
  if (mine !== opened) return;
  host.replaceChildren(...parts);
  host.querySelector("h2")?.scrollIntoView({ block: "nearest" });
}

async function readStep(run, step) {
  const { groups } = await read(of(run, `groups?step_from=${step}&step_to=${step}&limit=${PAGE}&sort=oldest`));
  return Promise.all(groups.map((one) => read(of(run, `groups/${one.step}/${one.task_id}`))));
}

/** A step: the times of its samples on one axis, as far as its groups are kept, and these groups. */
function drawStep(step, groups) {
  const samples = groups.flatMap((one) => one.samples.map((sample) => ({ ...sample, label: `prompt ${one.task_id}, sample ${sample.sample}` })));
  return [
    h("div", { class: "panel-head" }, h("h2", null, `Step ${count(Number(step))}`), h("div", { class: "head-do" }, back())),
    traces(samples) ?? h("p", { class: "empty" }, "No sample has a trace: the section trace of the configuration turns them on."),
    groups.length ? h("ul", { class: "groups" }, groups.map(row)) : h("p", { class: "empty" }, "No group of this step is kept."),
  ];
}

function drawGroup(run, one) {
  const others = shown.findIndex((head) => head.step === one.step && head.task_id === one.task_id);
  const beside = (by, text) => {
    const head = others < 0 ? undefined : shown[others + by];
    return h("button", { type: "button", class: "button small", disabled: !head, onclick: () => go("groups", [head.step, head.task_id]) }, text);
  };
  return [
    h("div", { class: "panel-head" },
      h("h2", null, `Step ${count(one.step)}, prompt ${one.task_id}`),
      h("div", { class: "head-do" }, back(), h("a", { class: "button small", href: link("groups", [one.step]) }, "Step"), beside(-1, "Previous"), beside(1, "Next"),
        h("button", { type: "button", class: "button small", onclick: () => save(new Blob([JSON.stringify(one, null, 2)], { type: "application/json" }), `${run}-step-${one.step}-prompt-${one.task_id}.json`) }, "Save as JSON"))),
    h("p", { class: "aside" }, `mean reward ${figure(one.mean)}, deviation ${figure(one.std)} · ${plural(one.n, "sample")} · trained weights of version ${one.version}`),
    h("h3", null, "Prompt"), h("pre", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, one.full_prompt),
    pictures([...new Set(one.samples.flatMap((sample) => sample.images))], of(run, "images")) ?? "",
    Object.keys(one.data).length ? h("dl", { class: "facts" }, Object.entries(one.data).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))) : "",
    traces(one.samples) ?? "",
    one.samples.length ? sideBySide(one.samples) : h("p", { class: "empty" }, "No sample was scored."),
  ];
}

const back = () => h("a", { class: "button small", href: link("groups") }, "All groups");

function show(parts) {
  const [run] = chosen();
  const [step, task] = parts;
  byId("group-all").hidden = parts.length > 0;
  byId("group-detail").hidden = !parts.length;
  if (!parts.length) search();
  else if (task === undefined) open(readStep(run, step), (groups) => drawStep(step, groups));
  else open(read(of(run, `groups/${step}/${task}`)), (one) => drawGroup(run, one));
}

export function start() {
  const input = (name, label, attributes) => h("label", { class: "filter" }, h("span", null, label), h("input", { name, ...attributes }));
  const form = byId("group-search");
  form.append(
    input("text", "Text in prompt or completion", { type: "search", maxlength: 200, placeholder: "any" }),
    input("step_from", "Step from", { type: "number", min: 0, placeholder: "any" }),
    input("step_to", "Step to", { type: "number", min: 0, placeholder: "any" }),
    input("mean_from", "Mean reward from", { type: "number", step: "any", placeholder: "any" }),
    input("mean_to", "to", { type: "number", step: "any", placeholder: "any" }),
    h("label", { class: "filter" }, h("span", null, "Order"), h("select", { name: "sort" },
      [["newest", "Newest"], ["oldest", "Oldest"], ["reward_low", "Lowest reward"], ["reward_high", "Highest reward"], ["spread", "Widest spread"], ["longest", "Longest"]]
        .map(([value, label]) => h("option", { value }, label)))),
    h("div", { class: "filter-do" }, h("button", { type: "button", class: "button", onclick: exportGroups }, "CSV"),
      h("button", { type: "reset", class: "button quiet-button" }, "Clear")));
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(search, PAUSE_MS);
  };
  form.addEventListener("input", soon);
  form.addEventListener("reset", soon);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });
  register("groups", show);
}
