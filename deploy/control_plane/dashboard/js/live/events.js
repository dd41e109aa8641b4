// The timeline: what happened and who ordered it, newest first.

import { byId, h, keyed, setAttribute, setText } from "../elements/dom.js";
import { timeOfDay } from "../elements/format.js";
import { on, store } from "../data/store.js";

const SHOWN = 150;

function show() {
  const serious = byId("event-level").value === "warning";
  const events = store.events.filter((event) => !serious || event.level !== "info").slice(-SHOWN).reverse();
  const list = byId("event-list");
  list.querySelector(".empty")?.remove();
  keyed(list, events, (event) => event.id,
    (event) => h("li", { class: "event", "data-level": event.level, "data-name": event.name },
      h("time", { datetime: new Date(event.time * 1000).toISOString() }, timeOfDay(event.time)),
      h("i", { class: "dot", "aria-hidden": "true" }),
      h("div", null, h("b"), h("span"), event.level === "info" ? null : h("em", null, event.level))),
    (element, event) => {
      const [name, text] = element.lastChild.children;
      setText(name, event.service);
      setText(text, event.text || event.name);
      setAttribute(element, "title", Object.keys(event.data).length ? JSON.stringify(event.data) : null);
    });
  if (!events.length) list.append(h("li", { class: "empty" }, serious ? "No warnings." : "Nothing has happened yet."));
}

export function start() {
  on("events", show);
  byId("event-level").addEventListener("change", show);
  show();
}
