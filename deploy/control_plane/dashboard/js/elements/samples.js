// Samples of one prompt side by side: reward with its terms, advantage, length, text, and the difference to the best.

import { difference } from "./diff.js";
import { h, setAttribute } from "./dom.js";
import { count, duration, figure } from "./format.js";

const SORTS = {
  reward: [(one) => -(one.reward ?? -Infinity), "Reward"], shortest: [(one) => one.tokens, "Shortest"],
  longest: [(one) => -one.tokens, "Longest"], sample: [(one) => one.sample, "Number"],
};
const known = (value) => value !== null && value !== undefined;
const signed = (value) => `${value > 0 ? "+" : ""}${figure(value)}`;

/** The sample of the highest reward, the shortest of several. */
export const best = (samples) => samples.reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ||
  (b.reward === a.reward && b.tokens < a.tokens) ? b : a), samples[0]);

const marked = (parts) => parts.map(([kind, text]) => (kind === "same" ? text : h(kind === "added" ? "ins" : "del", null, text)));

/** top: the best one; null where there is nothing to compare with. */
function card(one, top, compared) {
  const facts = [
    ...Object.entries(one.terms).map(([name, value]) => [name, figure(value)]),
    ...(known(one.advantage) ? [["advantage", signed(one.advantage)]] : []),
    ["tokens", count(one.tokens)], ["finish", one.finish],
    ...(known(one.oldest_version) ? [["version", one.oldest_version === one.newest_version ? one.oldest_version : `${one.oldest_version}–${one.newest_version}`]] : []),
    ["generator", one.generator], ["made in", duration(one.seconds)],
  ];
  const text = compared && one !== top ? marked(difference(top.completion, one.completion)) : one.completion;
  return h("li", { class: "sample", "data-sample": one.sample, "data-best": one === top ? "" : null },
    h("div", { class: "sample-head" }, h("b", null, `Sample ${one.sample}`), one === top ? h("em", null, "best") : null,
      h("span", { class: "sample-reward" }, known(one.reward) ? figure(one.reward) : "not scored")),
    h("dl", { class: "sample-facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    h("pre", { class: "sample-text", tabindex: "0", "aria-label": `Text of sample ${one.sample}` }, text));
}

/** An element with the samples, and controls for their order and the difference to the best. */
export function sideBySide(samples) {
  const top = samples.length > 1 ? best(samples) : null;
  let sort = "reward";
  let compared = false;
  const list = h("ul", { class: "samples", tabindex: "0", "aria-label": "Samples side by side" });
  const fill = () => {
    const [by] = SORTS[sort];
    list.replaceChildren(...[...samples].sort((a, b) => by(a) - by(b) || (b === top) - (a === top) || a.sample - b.sample).map((one) => card(one, top, compared)));
  };
  const buttons = [[false, "Texts"], [true, "Difference to the best"]].map(([value, label]) => h("button", {
    type: "button", "aria-pressed": value === compared, onclick: () => {
      compared = value;
      buttons.forEach((button, index) => setAttribute(button, "aria-pressed", (index === 1) === compared));
      fill();
    },
  }, label));
  const choice = h("select", { onchange: (event) => {
    sort = event.target.value;
    fill();
  } }, Object.entries(SORTS).map(([name, [, label]]) => h("option", { value: name }, label)));
  fill();
  return h("div", { class: "side" },
    top === null ? null : h("div", { class: "side-bar" },
      h("div", { class: "switch", role: "group", "aria-label": "What is shown of the texts" }, buttons), h("label", { class: "quiet" }, "Order", choice)),
    list);
}
