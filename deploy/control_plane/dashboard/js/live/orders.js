// Orders to the run: pause, resume, drain, checkpoint, stop, settings and replicas. Each asks before it is sent.

import { ask } from "../data/api.js";
import { confirm, open } from "../elements/dialogs.js";
import { byId, h, keyed, setAttribute, setText } from "../elements/dom.js";
import { count, plural } from "../elements/format.js";
import { on, store } from "../data/store.js";

const post = async (order, body) => (await ask("POST", `v1/${order}`, body)).text;
const ENDED = ["stopped", "finished", "failed", "stopping"];

function choice(value, title, text, checked) {
  return h("label", { class: "choice" },
    h("input", { type: "radio", name: "mode", value, checked }),
    h("span", null, h("b", null, title), h("span", null, text)));
}

function pause() {
  confirm({
    title: "Pause the run", verb: "Pause",
    body: h("fieldset", null,
      h("legend", { class: "hidden" }, "How"),
      choice("freeze", "Freeze", "Generators stop at once and keep their requests; the trainer stops after its step.", true),
      choice("drain", "Drain", "Admit nothing new and finish what runs; then everything can be switched off.")),
    act: async (form) => `Pause ordered: ${await post("pause", { mode: form.get("mode") })}`,
  });
}

function resume() {
  confirm({
    title: "Resume the run", verb: "Resume",
    body: h("p", null, "Generators resume the requests they kept, and the trainer continues with its next batch."),
    act: async () => `Resume ordered: ${await post("resume")}`,
  });
}

function checkpoint() {
  confirm({
    title: "Write a checkpoint", verb: "Write it",
    body: h("p", null, "The trainer saves it after the current step, and continues."),
    act: async () => `Checkpoint ordered: ${await post("checkpoint")}`,
  });
}

function stop() {
  confirm({
    title: "Stop the run", verb: "Stop the run", danger: true,
    body: h("p", null, "All services end in order, with a checkpoint, and this page with them. ",
      "Start it again under the same name to resume."),
    act: async () => `Stop ordered: ${await post("stop")}`,
  });
}

function scale(kind, now, wanted) {
  const more = wanted > now;
  const [role, pool = ""] = kind.split(".");
  confirm({
    title: more ? `Start another ${kind}` : `Stop a ${kind}`, verb: more ? "Start it" : "Stop it",
    body: h("p", null, `From ${plural(now, "replica")} to ${count(wanted)}. `,
      more ? "It joins as soon as it has loaded; nothing waits for it." : "It hands back what it has not finished."),
    act: async () => `Ordered: ${await post("scale", { role, pool, replicas: wanted })}`,
  });
}

function field(name, label, hint, value, min, step) {
  return h("div", { class: "field" },
    h("label", { for: `set-${name}` }, label),
    h("input", { id: `set-${name}`, name, type: "number", min, step, value: value ?? "", placeholder: "configuration's",
      "aria-describedby": `hint-${name}` }),
    h("p", { id: `hint-${name}` }, hint));
}

// Name, label, hint, least value, and the step of the field: the settings of PATCH /v1/settings.
const SETTINGS = [
  ["staleness", "Staleness bound", "Weight versions that a token may be behind when it is trained.", 0, 1],
  ["batch", "Batch", "Prompt groups in one step.", 1, 1],
  ["concurrency", "Concurrency", "Samples in flight in each generator.", 1, 1],
  ["lr", "Learning rate", "The peak, of which the schedule takes its part.", 0, "any"],
  ["steps", "Steps", "Of the whole run.", 1, 1],
  ["temperature", "Temperature", "Of sampling, for prompts that are admitted from now on.", 0, "any"],
  ["eval_every", "Evaluate every", "Weight versions between two evaluations.", 1, 1],
  ["checkpoint_every", "Checkpoint every", "Steps between two checkpoints.", 1, 1],
];

function settings() {
  const now = store.status.settings;
  const changed = now.changed.length ? `Changed by order: ${now.changed.join(", ")}.` : "All as in the configuration.";
  confirm({
    title: "Settings", verb: "Apply",
    body: [
      h("p", { class: "aside" }, `${changed} An empty field goes back to the configuration's.`),
      ...SETTINGS.map(([name, label, hint, least, step]) => field(name, label, hint, now[name], least, step)),
    ],
    act: async (form) => {
      const change = {};
      for (const [name] of SETTINGS) {
        const value = form.get(name) === "" ? null : Number(form.get(name));
        if (value !== now[name]) change[name] = value;
      }
      if (!Object.keys(change).length) return "Nothing was changed.";
      const set = await ask("PATCH", "v1/settings", change);
      return `Set: ${Object.keys(change).map((name) => `${name} ${set[name] ?? "as configured"}`).join(", ")}.`;
    },
  });
}

function menu() {
  const item = (title, text, action, disabled = "") => h("button", {
    type: "button", class: "menu-item", disabled: Boolean(disabled),
    onclick: () => {
      dialog.close();
      action();
    },
  }, h("b", null, title), h("span", null, disabled || text));
  const { scaling, state } = store.status;
  const over = ENDED.includes(state) ? `the run is ${state}` : "";
  const dialog = open("Orders", h("div", { class: "menu" },
    item("Settings", "Staleness bound, batch, learning rate, steps and others, while it runs.", settings, over),
    item("Checkpoint now", "After the present step.", checkpoint, over),
    item("Stop the run", "In order, with a checkpoint.", stop,
      over || (scaling.by === "supervisor" ? "" : "It was not started with tidemill up: stop its services where they run."))));
}

function showScale() {
  const { scaling, state } = store.status;
  const host = byId("scale");
  setAttribute(host, "title", scaling.refusal || null);
  const roles = Object.entries(scaling.replicas);
  keyed(host, roles, ([role]) => role,
    ([role]) => {
      const change = (by) => () => {
        const now = store.status.scaling.replicas[role];
        scale(role, now, now + by);
      };
      const button = (sign, name, by) =>
        h("button", { type: "button", class: "button step", "aria-label": `${name} ${role}`, onclick: change(by) }, sign);
      return h("div", { class: "stepper", role: "group", "aria-label": `${role} replicas` },
        h("span", null, role), button("−", "Stop a", -1), h("b"), button("+", "Start another", 1));
    },
    (element, [role, replicas]) => {
      const [, less, number, more] = element.children;
      setText(number, count(replicas));
      less.disabled = ENDED.includes(state) || replicas <= (role === "reward" ? 1 : 0);
      more.disabled = ENDED.includes(state);
    });
}

function show() {
  const { status, link } = store;
  const button = byId("pause");
  const away = link.state !== "live" || !status;
  const paused = status && status.pause.mode !== "none";
  setText(button, paused ? "Resume" : "Pause");
  button.disabled = away || ENDED.includes(status.state);
  byId("orders").disabled = away;
  if (status) showScale();
}

export function start() {
  on("status", show);
  on("link", show);
  byId("pause").addEventListener("click", () => (store.status.pause.mode === "none" ? pause() : resume()));
  byId("orders").addEventListener("click", menu);
}
