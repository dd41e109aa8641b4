// An episode as its messages: who said what, with reasoning and tools folded; and the rows that it is trained as.

import { h } from "./dom.js";
import { plural } from "./format.js";
import { pictures } from "./pictures.js";

const LINE = 90;

/** The beginning of a text, on one line. */
function beginning(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > LINE ? `${line.slice(0, LINE)}…` : line;
}

const fold = (summary, inside) => h("details", { class: "fold" }, h("summary", null, summary), inside);

function toolUse(tool) {
  const name = [h("b", null, tool.name), ` ${beginning(tool.arguments)}`, tool.result === null ? "" : ` → ${beginning(tool.result)}`];
  return fold(name, [
    h("h4", null, "Arguments"), h("pre", null, tool.arguments),
    h("h4", null, "Result"), tool.result === null ? h("p", { class: "aside" }, "None was given back.") : h("pre", null, tool.result),
    pictures(tool.images),
  ]);
}

function message(one) {
  const reasoning = one.reasoning === null ? null
    : fold(`Reasoning, ${plural(one.reasoning.length, "character")}`, h("p", { class: "message-text" }, one.reasoning));
  return h("li", { class: "turn", "data-role": one.role }, h("span", { class: "turn-role" }, one.role),
    h("div", { class: "message" }, reasoning, one.text ? h("p", { class: "message-text" }, one.text) : null, pictures(one.images), one.tools.map(toolUse)));
}

/** The messages of an episode. */
export const conversation = (messages) => h("ol", { class: "messages", "aria-label": "Conversation" }, messages.map(message));

const range = (start, end) => Array.from({ length: end - start }, (_, index) => start + index);

/** Rows of a trajectory: the places of their tokens in its table, the first `shared` of which another row trains. */
export function rowsOf(one) {
  const found = [];
  for (const { start, end, parent, shared, name } of one.segments)
    found.push({ name, shared, places: [...(parent < 0 ? [] : found[parent].places.slice(0, shared)), ...range(start, end)] });
  return found.length ? found : [{ name: "main", shared: 0, places: range(0, one.token_table.id.length) }];
}
