// Where the compute went: what became of each generated token, and what each second of a device was used for.

import { on, store } from "../data/store.js";
import { byId, h, keyed, setAttribute, setText } from "../elements/dom.js";
import { duration, percent, short } from "../elements/format.js";

const NAMES = { generator: "Generators", trainer: "Trainer" };
const DONE = ["trained", "compute"];
/** A part below this share is not written into its bar. */
const WIDE = 0.08;

/** The bars: {name, total, unit, parts: [[name, amount]]}, what served the training first, then by size. */
function bars({ ledger }) {
  const sorted = (of) => Object.entries(of).filter(([, value]) => value > 0)
    .sort(([one, a], [two, b]) => DONE.includes(two) - DONE.includes(one) || b - a);
  const found = [{ name: "Tokens", unit: short, parts: sorted(ledger.tokens) }];
  for (const [role, { held, ...uses }] of Object.entries(ledger.devices))
    found.push({ name: NAMES[role] ?? role, unit: duration, held, parts: sorted(uses) });
  return found.map((bar) => ({ ...bar, total: bar.parts.reduce((sum, [, value]) => sum + value, 0) }));
}

function showBar(element, bar) {
  const [head, line] = element.children;
  setText(head.firstChild, bar.name);
  setText(head.lastChild, bar.total ? `${bar.unit(bar.total)}${bar.unit === duration ? " of devices" : ""}` : "none yet");
  setAttribute(line, "aria-label",
    `${bar.name}: ${bar.parts.map(([name, value]) => `${name.replaceAll("_", " ")} ${percent(value / bar.total)}`).join(", ")}`);
  keyed(line, bar.parts, ([name]) => name, ([name]) => h("span", { "data-part": name }), (part, [name, value]) => {
    const words = `${name.replaceAll("_", " ")} ${percent(value / bar.total)}`;
    part.style.flexGrow = value / bar.total;
    part.title = `${words}: ${bar.unit(value)}`;
    setText(part, value / bar.total >= WIDE ? words : "");
  });
}

export function start() {
  on("status", () => keyed(byId("use-bars"), bars(store.status), (bar) => bar.name,
    () => h("div", { class: "use" }, h("p", null, h("b"), h("span", { class: "aside" })), h("div", { class: "use-bar", role: "img" })),
    showBar));
}
