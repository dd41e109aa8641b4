// Every service with its state, load and speed. One that falls silent turns red, and leaves the list after a while.
// A long list scrolls by itself; how many there are stands above it.

import { byId, h, keyed, setAttribute, setText } from "../elements/dom.js";
import { DASH, count, duration, percent, plural, rate, short, small } from "../elements/format.js";
import { spark } from "../elements/spark.js";
import { on, store } from "../data/store.js";

/** Heartbeats come once a second. */
export const RED_S = 5;
export const LEAVES_S = 20;
const POINTS = 90;
/** With more services than these their number is said. */
const FEW = 12;
const ENDED = ["stopped", "finished", "failed"];
const ONE_OF_A_KIND = ["feeder", "trainer"];

/** live, silent (red) or gone (no longer listed). A run has one trainer and one feeder: those are missed for ever. */
export function presence(service) {
  if (service.silent_s < RED_S) return "live";
  return service.silent_s < LEAVES_S || ONE_OF_A_KIND.includes(service.role) ? "silent" : "gone";
}

/** Growth a second of a count, as points between looks. */
function growth(values) {
  return values.slice(1).map((value, index) => {
    const before = values[index];
    return value === undefined || value === null || before === undefined || before === null || value < before ? null : value - before;
  });
}

function activity(service) {
  const looks = store.ticks.slice(-POINTS).map((tick) => tick.services[service.name] ?? null);
  const values = looks.slice(Math.max(0, looks.findIndex((value) => value !== null)));
  if (service.role === "generator" || service.role === "trainer")
    return { points: values, text: `${short(service.tokens_per_s)} tok/s` };
  if (service.figures.ok === undefined && service.figures.cursor === undefined) return { points: [], text: "" };
  const points = growth(values);
  const recent = points.slice(-10).filter((value) => value !== null);
  const mean = recent.length ? recent.reduce((sum, value) => sum + value, 0) / recent.length : null;
  return { points, text: mean === null ? DASH : `${rate(mean)} ${service.role === "reward" ? "samples" : "groups"}/s` };
}

/** What is worth saying of one service besides its state. */
function note(service) {
  const said = [];
  if (service.version !== null) said.push(`version ${count(service.version)}`);
  if (service.figures.evaluating) said.push("evaluates");
  const { device_held_s: held, device_lent_s: lent, device_share: share } = service.figures;
  if (held !== undefined) said.push(`has its GPU for ${duration(held)}`);
  if (lent !== undefined) said.push(`without its GPU for ${duration(lent)}`);
  if (share !== undefined) said.push(`had it ${percent(share)} of the time`);
  const parts = Object.entries(service.figures).filter(([name]) => name.startsWith("hand_over:"));
  if (parts.length) said.push(`last hand-over: ${parts.map(([name, value]) => `${name.slice(10)} ${duration(value)}`).join(", ")}`);
  if (service.load !== null && service.state !== "loading") said.push(`${percent(service.load)} full`);
  const { mismatch_gap: gap, mismatch_kl: kl } = service.figures;
  if (gap !== undefined) said.push(`log-probability gap ${small(gap)}`);
  if (kl !== undefined) said.push(`KL ${small(kl)}`);
  const failed = (service.figures.error ?? 0) + (service.figures.timeout ?? 0);
  if (failed) said.push(`${count(failed)} failed`);
  return said.join(" · ");
}

function row() {
  return h("li", { class: "service" },
    h("i", { class: "dot", "aria-hidden": "true" }),
    h("div", { class: "service-name" }, h("b"), h("span")),
    h("div", { class: "service-state" }, h("b"), h("span")),
    h("div", { class: "service-speed" }, h("b"), spark()));
}

function update(element, service) {
  const here = presence(service);
  const [, name, state, speed] = element.children;
  setAttribute(element, "data-presence", here);
  setAttribute(element, "data-service", service.name);
  setText(name.firstChild, service.name);
  setText(name.lastChild, `${service.host} · ${service.pid}`);
  setText(state.firstChild, here === "live" ? service.state : `silent for ${duration(service.silent_s)}`);
  setText(state.lastChild, note(service));
  const { points, text } = activity(service);
  setText(speed.firstChild, here === "live" ? text : "");
  speed.lastChild.show(points);
}

/** A pool stands above the services, in the same columns. */
function updatePool(element, pool) {
  const [, name, state, speed] = element.children;
  setText(name.firstChild, `pool ${pool.name}`);
  setText(name.lastChild, plural(pool.generators, "generator"));
  setText(state.firstChild, pool.logprob_gap === null ? "" : `log-probability gap ${small(pool.logprob_gap)}`);
  setText(state.lastChild, pool.trained_share === null ? "" : `${percent(pool.trained_share)} of the trained tokens`);
  setText(speed.firstChild, `${short(pool.tokens_per_s)} tok/s`);
}

function show() {
  const host = byId("service-list");
  if (!host.children.length) {
    host.append(h("ul", { class: "services", tabindex: "0", "aria-label": "Services" }), h("p", { class: "empty" }));
    host.prepend(h("ul", { class: "services", "aria-label": "Pools of generators" }));
  }
  const shown = store.status.services.filter((service) => presence(service) !== "gone");
  const gone = store.status.services.filter((service) => presence(service) === "gone");
  keyed(host.firstChild, store.status.pools, (pool) => pool.name, row, updatePool);
  host.firstChild.hidden = !store.status.pools.length;
  keyed(host.children[1], shown, (service) => service.name, row, update);
  setText(host.lastChild, gone.length
    ? `Left without a word: ${gone.map((service) => `${service.name} (${duration(service.silent_s)} ago)`).join(", ")}`
    : shown.length ? "" : ENDED.includes(store.status.state) ? "All services have ended." : "No service has been heard of.");
  setText(byId("service-note"), shown.length > FEW ? `${count(shown.length)} in all` : "");
  host.lastChild.hidden = !host.lastChild.textContent;
}

export function start() {
  on("status", show);
}
