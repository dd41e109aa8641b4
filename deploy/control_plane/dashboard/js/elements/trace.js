// The trace of an episode, drawn on an axis of time: from its admission over its attempts, calls and reward to its step.

import { h } from "./dom.js";
import { duration, plural } from "./format.js";

const NAMES = { admitted: "admitted", attempt: "attempt", chat: "model call", tool: "tool", term: "reward", step: "training step" };

const span = (from, length, one, text) => h("i", {
  "data-kind": one.kind, "data-failed": one.failed ? "" : null, title: text,
  style: `left: ${100 * from}%; width: ${100 * length}%`,
});

function words(one) {
  const said = [[NAMES[one.kind], one.name].filter(Boolean).join(" ")];
  if (one.kind !== "admitted") said.push(duration(one.end - one.start));
  if (one.tokens && one.kind === "chat") said.push(plural(one.tokens, "token"));
  if (one.failed) said.push("failed");
  return said.join(", ");
}

/** The begin of a list of traces, and how long they take together. */
function range(traces) {
  const all = traces.flat();
  const begin = Math.min(...all.map((one) => one.start));
  return [begin, Math.max(...all.map((one) => one.end)) - begin || 1];
}

/** One episode: a line for each moment, calls under their attempt. null without a trace. */
export function trace(moments) {
  if (!moments.length) return null;
  const [begin, length] = range([moments]);
  return h("ol", { class: "trace", "aria-label": `Trace, ${duration(length)}` }, moments.map((one) =>
    h("li", { "data-inside": one.kind === "chat" || one.kind === "tool" ? "" : null }, h("span", null, words(one)),
      h("div", { class: "trace-line" }, span((one.start - begin) / length, (one.end - one.start) / length, one,
        `${words(one)}, ${duration(one.start - begin)} after the beginning`)))));
}

/** Several episodes on one axis: a line each. samples: with sample or label, and trace. null if none has a trace. */
export function traces(samples) {
  const known = samples.filter((one) => one.trace.length);
  if (!known.length) return null;
  const [begin, length] = range(known.map((one) => one.trace));
  const list = h("ol", { class: "trace", "aria-label": `Traces of ${plural(known.length, "sample")}, ${duration(length)}` }, known.map((sample) =>
    h("li", null, h("span", null, sample.label ?? `sample ${sample.sample}`), h("div", { class: "trace-line" }, sample.trace.map((one) =>
      span((one.start - begin) / length, (one.end - one.start) / length, one, words(one)))))));
  return h("div", null, h("h3", null, "Traces"), list);
}
