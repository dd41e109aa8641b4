// Dead letters: messages that could not be processed. Show one, admit its prompt group again, or drop it.

import { ask, read, refused } from "../data/api.js";
import { confirm, notice, open } from "../elements/dialogs.js";
import { byId, h, keyed, setText } from "../elements/dom.js";
import { bytes, count, plural, task, timeOfDay } from "../elements/format.js";
import { on, store } from "../data/store.js";

const FIRST = 6;
const MOST = 100;
let seen = -1;
let shown = FIRST;

const subject = (letter) => letter.task_id === null ? "no task"
  : `task ${task(letter.task_id)}${letter.sample === null ? "" : ` · sample ${letter.sample}`}`;

async function show(letter) {
  try {
    const whole = await read(`v1/dead-letters/${letter.id}`);
    open(`Dead letter ${letter.id}`, h("div", { class: "dialog-body" },
      h("p", null, whole.reason),
      h("p", { class: "aside" }, `${whole.source} · ${subject(whole)} · delivered ${plural(whole.deliveries, "time")} · ${bytes(whole.bytes)}`),
      h("pre", { tabindex: "0", "aria-label": "What it carried" }, JSON.stringify(whole.payload, null, 2))), { wide: true });
  } catch (error) {
    notice(refused(error).message, "bad");
  }
}

function requeue(letter) {
  confirm({
    title: "Requeue", verb: "Requeue",
    body: h("p", null, `The prompt group of ${subject(letter)} is admitted again, before all others.`),
    act: async () => {
      const { text } = await ask("POST", `v1/dead-letters/${letter.id}/requeue`);
      await refresh();
      return `Requeued: ${text}`;
    },
  });
}

function drop(letter) {
  confirm({
    title: "Drop the letter", verb: "Drop it", danger: true,
    body: h("p", null, `What ${letter.source} could not process (${subject(letter)}) is deleted permanently.`),
    act: async () => {
      await ask("DELETE", `v1/dead-letters/${letter.id}`);
      await refresh();
      return "The letter is deleted.";
    },
  });
}

function row(letter) {
  const button = (text, action) => h("button", {
    type: "button", class: "button small", "aria-label": `${text} dead letter ${letter.id}`, onclick: () => action(letter),
  }, text);
  return h("li", { class: "letter" },
    h("div", { class: "letter-what" },
      h("b", null, letter.reason),
      h("span", null, `${timeOfDay(letter.time)} · ${letter.source} · ${subject(letter)} · ` +
        `delivered ${plural(letter.deliveries, "time")} · ${bytes(letter.bytes)}`)),
    h("div", { class: "letter-do" }, button("Show", show), button("Requeue", requeue), button("Drop", drop)));
}

function showAll() {
  shown = MOST;
  refresh();
}

async function refresh() {
  let found;
  try {
    found = await read(`v1/dead-letters?limit=${MOST}&order=newest`);
  } catch (error) {
    refused(error);
    seen = -1;
    return;
  }
  const host = byId("letter-list");
  if (!host.children.length) host.append(h("ul", { class: "letters" }), h("p", { class: "empty" }),
    h("button", { type: "button", class: "button more", onclick: showAll }, "Show more"));
  const [list, none, more] = host.children;
  keyed(list, found.letters.slice(0, shown), (letter) => letter.id, row, () => {});
  setText(none, found.letters.length ? "" : "None. Messages that cannot be processed end up here.");
  none.hidden = found.letters.length > 0;
  more.hidden = found.letters.length <= shown;
  setText(byId("letter-note"), found.total ? `${count(found.letters.length)} kept of ${count(found.total)} ever` : "");
}

export function start() {
  on("status", () => {
    if (store.status.dead_letters === seen) return;
    seen = store.status.dead_letters;
    refresh();
  });
  on("connected", refresh);
}
