// Logs of a run's services: the newest lines, filtered by level and text, and followed as they grow.

import { read, refused } from "../data/api.js";
import { chosen, of } from "../data/archive.js";
import { byId, h, setText } from "../elements/dom.js";
import { bytes, plural } from "../elements/format.js";
import { go, place, register } from "../data/route.js";

const EVERY_MS = 1500;
const KEPT = 4000;
const SHOWN = 1000;
const LEVELS = ["debug", "info", "warning", "error", "critical"];
const PLACE = ["level", "event", "timestamp", "run", "role", "service", "exc_info"];
let lines = [];
let end = null;
let size = 0;
let timer = 0;
let service = null;
let asked = 0;
let opened = 0;
let busy = false;

/** A line as {time, level, text, rest}; what is no JSON is text. */
export function parse(line) {
  if (line.startsWith("{")) {
    try {
      const found = JSON.parse(line);
      const rest = Object.entries(found).filter(([name]) => !PLACE.includes(name) && name !== "exception");
      return {
        time: String(found.timestamp ?? "").replace(/^\d{4}-\d\d-\d\dT/, "").replace(/(\.\d{3})\d*Z?$/, "$1").replace(/Z$/, ""),
        level: LEVELS.includes(found.level) ? found.level : "info", text: String(found.event ?? ""),
        rest: rest.map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`).join(" "),
        trace: found.exception ?? null,
      };
    } catch {
      // Not a line of ours.
    }
  }
  return { time: "", level: /\b(error|traceback|critical)\b/i.test(line) ? "error" : /\bwarning\b/i.test(line) ? "warning" : "info", text: line, rest: "", trace: null };
}

function fits(one) {
  const least = LEVELS.indexOf(byId("log-level").value);
  const text = byId("log-text").value.toLowerCase();
  return LEVELS.indexOf(one.level) >= least && (!text || `${one.text} ${one.rest} ${one.trace ?? ""}`.toLowerCase().includes(text));
}

function draw() {
  const box = byId("log-lines");
  const found = lines.filter(fits).slice(-SHOWN);
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
  box.replaceChildren(...found.map((one) => h("div", { class: "log-line", "data-level": one.level },
    h("time", null, one.time), h("span", { class: "log-level" }, one.level === "info" ? "" : one.level),
    h("span", null, one.text, one.rest ? h("em", null, ` ${one.rest}`) : null, one.trace ? h("pre", null, one.trace) : null))));
  if (!found.length) box.replaceChildren(h("p", { class: "empty" }, lines.length ? "No line fits." : "Nothing is written yet."));
  setText(byId("log-note"), `${plural(found.length, "line")} of ${bytes(size)}`);
  if (byId("log-follow").checked && atEnd) box.scrollTop = box.scrollHeight;
}

async function load(again) {
  const [run] = chosen();
  if (service === null || run === undefined || (again && busy)) return;
  busy = true;
  const number = again ? asked : ++asked;
  try {
    const found = await read(of(run, `logs/${encodeURIComponent(service)}?most=262144${again && end !== null ? `&after=${end}` : ""}`));
    if (number !== asked) return;
    const restart = !again || found.start !== end;
    if (!restart && !found.lines.length) return;
    lines = (restart ? [] : lines).concat(found.lines.map(parse)).slice(-KEPT);
    [end, size] = [found.end, found.bytes];
    draw();
    if (!again) byId("log-lines").scrollTop = byId("log-lines").scrollHeight;
  } catch (error) {
    setText(byId("log-note"), refused(error).message);
  } finally {
    busy = false;
  }
}

async function show([wanted]) {
  const mine = ++opened;
  clearInterval(timer);
  const [run] = chosen();
  if (run === undefined) return setText(byId("log-note"), "No run is here yet.");
  let found = [];
  try {
    found = (await read(of(run, "logs"))).logs;
  } catch (error) {
    setText(byId("log-note"), refused(error).message);
  }
  // Another run may have been chosen meanwhile.
  if (mine !== opened) return;
  const names = found.map((one) => one.service);
  // A service that has nothing to complain of writes nothing.
  const written = ["trainer", "up", ...names].find((name) => found.some((one) => one.service === name && one.bytes));
  service = names.includes(wanted) ? wanted : written ?? names[0] ?? null;
  byId("log-service").replaceChildren(...found.map((one) => h("option", { value: one.service, selected: one.service === service }, `${one.service} (${bytes(one.bytes)})`)));
  [lines, end] = [[], null];
  if (service === null) {
    byId("log-lines").replaceChildren(h("p", { class: "empty" }, "The run's folder has no logs here: services that run elsewhere keep theirs."));
    return setText(byId("log-note"), "");
  }
  await load(false);
  // Another view may have been opened meanwhile.
  if (mine === opened) timer = setInterval(() => byId("log-follow").checked && !document.hidden && load(true), EVERY_MS);
}

export function start() {
  register("logs", show, () => {
    opened++;
    clearInterval(timer);
  });
  byId("log-service").addEventListener("change", (event) => go("logs", [event.target.value], place().query.getAll("run")));
  byId("log-level").addEventListener("change", draw);
  byId("log-text").addEventListener("input", draw);
  byId("log-form").addEventListener("submit", (event) => event.preventDefault());
}
