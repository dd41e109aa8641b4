// Search among the trajectories in the pipeline and those that are kept for reading; one opens in the reader.

import { read, refused } from "../data/api.js";
import { byId, h, setText } from "../elements/dom.js";
import { count, plural, reward, task, timeOfDay, versions } from "../elements/format.js";
import { openReader } from "./reader.js";
import { on } from "../data/store.js";

const PAUSE_MS = 300;
const FIRST = 12;
const MOST = 200;
let limit = FIRST;
const AGAIN_MS = 4000;
let asked = 0;
let searched = 0;
let empty = true;
let timer = 0;

const input = (name, label, attributes) => h("label", { class: "filter" }, h("span", null, label), h("input", { name, ...attributes }));
const select = (name, label, options) => h("label", { class: "filter" }, h("span", null, label),
  h("select", { name }, h("option", { value: "" }, "any"), options.map((one) => h("option", { value: one }, one))));

function query() {
  const given = new FormData(byId("search"));
  const wanted = new URLSearchParams({ limit, order: "newest" });
  for (const [name, value] of given) if (value.trim() !== "") wanted.set(name, value.trim());
  return wanted;
}

async function search() {
  const number = ++asked;
  searched = Date.now();
  let found;
  try {
    found = await read(`v1/trajectories?${query()}`);
  } catch (error) {
    refused(error);
    if (number === asked) setText(byId("trajectory-note"), error.message);
    return;
  }
  if (number !== asked) return; // A newer search is under way.
  const { trajectories, examined, complete } = found;
  empty = !trajectories.length;
  const more = complete ? "" : ", there may be more";
  setText(byId("trajectory-note"), `${plural(trajectories.length, "trajectory", "trajectories")}, newest first; ` +
    `${count(examined)} looked at${more}`);
  byId("trajectory-list").replaceChildren(trajectories.length
    ? h("div", null,
      h("ul", { class: "trajectories" }, trajectories.map((one, index) => row(one, trajectories, index))),
      trajectories.length === limit && limit < MOST ? h("button", { type: "button", class: "button more", onclick: showMore }, "Show more") : null)
    : h("p", { class: "empty" }, "None fits. Trajectories stay here until they are trained, and a few of each step longer."));
}

function showMore() {
  limit = Math.min(MOST, limit * 3);
  search();
}

function row(one, all, index) {
  return h("li", null,
    h("button", {
      type: "button", class: "trajectory", onclick: () => openReader(all, index),
      "aria-label": `Read task ${task(one.task_id)}, sample ${one.sample}`,
    },
      h("span", { class: "trajectory-id" }, h("b", null, `${task(one.task_id).replace(/^.*prompt /, "")} · ${one.sample}`),
        h("span", null, one.kind === "eval" ? task(one.task_id).replace(/,.*/, "") : one.state)),
      h("span", { class: "trajectory-reward", "data-status": one.score_status ?? "none" }, reward(one)),
      h("span", { class: "trajectory-text" }, h("span", null, one.prompt), h("b", null, one.completion)),
      h("span", { class: "trajectory-facts" },
        h("span", null, `${plural(one.tokens, "token")}${one.calls ? ` · ${plural(one.calls, "call")}` : ""} · version ${versions(one)}`),
        h("span", null, `${one.finish} · ${one.generator} · ${timeOfDay(one.time)}`))));
}

export function start() {
  const form = byId("search");
  form.append(
    input("task_id", "Task", { type: "number", min: 0, placeholder: "any" }),
    input("reward_min", "Reward from", { type: "number", step: "any", placeholder: "any" }),
    input("reward_max", "Reward to", { type: "number", step: "any", placeholder: "any" }),
    input("version", "Version", { type: "number", min: 0, placeholder: "any" }),
    select("finish", "Finish", ["stop", "length", "abort", "calls", "deadline"]),
    select("state", "State", ["generated", "scored", "trained"]),
    select("kind", "Kind", ["train", "eval"]),
    h("div", { class: "filter-do" },
      h("button", { type: "submit", class: "button" }, "Search again"),
      h("button", { type: "reset", class: "button quiet-button" }, "Clear")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    fresh();
  });
  const fresh = () => {
    clearTimeout(timer);
    limit = FIRST;
    search();
  };
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(fresh, PAUSE_MS);
  };
  form.addEventListener("input", soon);
  form.addEventListener("reset", soon);
  on("connected", () => empty && search());
  // A list with something in it stays as it is while it is read; an empty one is looked at again.
  on("status", () => empty && Date.now() - searched > AGAIN_MS && search());
}
