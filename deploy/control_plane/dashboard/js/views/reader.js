// One trajectory in full: its messages, and its tokens coloured by weight version, log-probability or mask. Arrow keys
// walk through the tokens, J and K through the list it was opened from.

import { read, refused } from "../data/api.js";
import { conversation, rowsOf } from "../elements/conversation.js";
import { open } from "../elements/dialogs.js";
import { h, setAttribute, setText } from "../elements/dom.js";
import { count, duration, figure, percent, plural, reward, task, versions } from "../elements/format.js";
import { pictures } from "../elements/pictures.js";
import { legend, shades } from "../elements/shades.js";
import { trace } from "../elements/trace.js";

const MODES = [["version", "Version"], ["logprob", "Log-probability"], ["mask", "Mask"]];
let mode = "version";

/** A token as it can be seen: blanks and line ends have signs. */
const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");

function said(table, index, elsewhere = false) {
  if (index === null) return "Choose a token: click it, or use the arrow keys.";
  const own = table.mask[index] === 1;
  const facts = [`token ${index}`, `id ${table.id[index]}`];
  if (table.text) facts.unshift(JSON.stringify(table.text[index]));
  if (!own) return `${facts.join(" · ")} · not trained on`;
  if (elsewhere) facts.push("trained in an earlier row");
  const logprob = table.logprob[index];
  return `${facts.join(" · ")} · version ${table.version[index]} · log-probability ${figure(logprob)} · probability ${percent(Math.exp(logprob))}`;
}

function tokens(one) {
  const table = one.token_table;
  const rows = rowsOf(one);
  let row;
  let spans;
  const line = h("p", { class: "token-line", role: "status" }, said(table, null));
  const keys = h("div", { class: "keys" });
  let chosen = null;
  const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys walk through them" });
  const tell = (index) => setText(line, said(table, row.places[index], index < row.shared));
  const choose = (index) => {
    if (chosen !== null) spans[chosen].classList.remove("is-chosen");
    chosen = Math.max(0, Math.min(spans.length - 1, index));
    spans[chosen].classList.add("is-chosen");
    spans[chosen].scrollIntoView({ block: "nearest" });
    tell(chosen);
  };
  box.addEventListener("click", (event) => event.target.dataset.index && choose(Number(event.target.dataset.index)));
  box.addEventListener("pointerover", (event) => event.target.dataset.index && tell(Number(event.target.dataset.index)));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
    if (!by || !spans.length) return;
    event.preventDefault();
    choose(chosen === null ? row.places.findIndex((place, index) => index >= row.shared && table.mask[place] === 1) : chosen + by);
  });
  const paint = () => {
    const names = shades(mode, table);
    spans.forEach((span, index) => setAttribute(span, "data-shade", index < row.shared ? "none" : names[row.places[index]]));
    keys.replaceChildren(...legend(mode, table).map(([name, text]) =>
      h("span", { class: "key-token" }, h("i", { class: "token", "data-shade": name }), text)));
  };
  const show = (wanted) => {
    row = rows[wanted];
    chosen = null;
    setText(line, said(table, null));
    spans = row.places.map((place, index) =>
      h("span", { class: "token", "data-index": index }, table.text ? visible(table.text[place]) : `${table.id[place]} `));
    box.replaceChildren(...blocks(one, row, spans));
    paint();
  };
  show(0);
  const buttons = MODES.map(([name, label]) => h("button", { type: "button", "data-mode": name, "aria-pressed": name === mode }, label));
  const modes = h("div", { class: "switch", role: "group", "aria-label": "Colour tokens by" }, buttons);
  modes.addEventListener("click", (event) => {
    if (!event.target.dataset.mode) return;
    mode = event.target.dataset.mode;
    for (const button of buttons) setAttribute(button, "aria-pressed", button.dataset.mode === mode);
    paint();
  });
  return [rows.length > 1 ? rowSwitch(rows, show) : null, h("div", { class: "reader-bar" }, modes, keys), box, line];
}

/** Buttons that choose which of several rows is shown. */
function rowSwitch(rows, show) {
  const buttons = rows.map(({ name, places, shared }, index) => h("button", {
    type: "button", "aria-pressed": index === 0, "data-row": index,
    title: shared ? `begins with ${plural(shared, "token")} of an earlier row` : null,
  }, `${index + 1} ${name}, ${plural(places.length - shared, "token")}`));
  const box = h("div", { class: "switch rows", role: "group", "aria-label": "Row of training" }, buttons);
  box.addEventListener("click", (event) => {
    if (!event.target.dataset.row) return;
    for (const button of buttons) setAttribute(button, "aria-pressed", button === event.target);
    show(Number(event.target.dataset.row));
  });
  return box;
}

/** Tokens of a row by turn, each under the name of who spoke, with what it earned. */
function blocks(one, row, spans) {
  const turns = one.turns.length ? one.turns : [{ role: "all", start: 0, end: one.token_table.id.length, reward: null }];
  const turnOf = new Map(turns.flatMap((turn) => Array.from({ length: turn.end - turn.start }, (_, at) => [turn.start + at, turn])));
  const found = [];
  row.places.forEach((place, index) => {
    const turn = turnOf.get(place);
    if (!found.length || found.at(-1).turn !== turn) found.push({ turn, spans: [] });
    found.at(-1).spans.push(spans[index]);
  });
  return found.map(({ turn, spans: own }) => h("div", { class: "turn" },
    h("span", { class: "turn-role" }, turn?.role ?? "", known(turn?.reward) ? h("b", null, `reward ${figure(turn.reward)}`) : null),
    h("div", { class: "turn-text" }, own)));
}

const known = (value) => value !== null && value !== undefined;

function facts(one) {
  const pairs = [
    ["Reward", reward(one)],
    ...Object.entries(one.components).map(([name, value]) => [name, figure(value)]),
    ...(known(one.workflow_reward) ? [["Workflow's reward", figure(one.workflow_reward)]] : []),
    ["Finish", one.finish], ["Versions", versions(one)], ["Tokens", count(one.tokens)], ["Made in", duration(one.seconds)],
    ["Temperature", figure(one.temperature)],
    ...(one.calls ? [["Model calls", count(one.calls)]] : []), ...(one.rows > 1 ? [["Rows", count(one.rows)]] : []),
    ...Object.entries(one.metrics).map(([name, value]) => [name, Number.isInteger(value) ? count(value) : figure(value)]),
    ["Generator", one.generator], ["State", one.step === null ? one.state : `trained in step ${count(one.step)}`],
    ...(one.score_reason ? [["Scorer said", one.score_reason]] : []),
    ...Object.entries(one.data).filter(([name]) => name !== "messages" || !one.messages.length).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]),
  ];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

function content(one) {
  const spoken = one.messages.length ? [h("h3", null, "Conversation"), conversation(one.messages)] : [];
  const plain = one.token_table.text || spoken.length ? [] : [
    h("p", { class: "aside" }, "The tokenizer is not at hand here: text as a whole, and token ids."),
    h("h3", null, "Prompt"), h("pre", { tabindex: "0" }, one.full_prompt),
    h("h3", null, "Completion"), h("pre", { tabindex: "0" }, one.full_completion),
  ];
  // A conversation shows them where they stand.
  const shown = one.images.length && !one.messages.some((message) => message.images.length || message.tools.some((tool) => tool.images.length))
    ? [h("h3", null, "Images"), pictures([...new Set(one.images.map((image) => image.digest))])] : [];
  const title = spoken.length || plain.length || shown.length ? [h("h3", null, "Tokens")] : [];
  const drawn = one.trace.length ? [h("h3", null, "Trace"), trace(one.trace)] : [];
  return [facts(one), drawn, spoken, shown, plain, title, tokens(one)].flat(2).filter(known);
}

/** What the list knew of a sample that has left the broker since. */
const left = (head) => [
  h("p", { class: "aside" }, "It has left the broker: a sample can be read until it is trained, a few of each step for some time" +
    " longer. This is what the list showed of it; search again for newer ones."),
  h("dl", { class: "facts" }, [
    ["Reward", reward(head)], ["Finish", head.finish], ["Versions", versions(head)], ["Tokens", count(head.tokens)],
    ["Generator", head.generator],
  ].map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
  h("h3", null, "Prompt"), h("pre", { tabindex: "0" }, head.prompt),
  h("h3", null, "Completion"), h("pre", { tabindex: "0" }, head.completion),
];

/** Open the reader at one of a list of heads. */
export function openReader(heads, index) {
  const body = h("div", { class: "dialog-body reader" });
  const step = (by) => h("button", {
    type: "button", class: "button small", onclick: () => show(index + by), "aria-keyshortcuts": by > 0 ? "J" : "K",
  }, by > 0 ? "Next" : "Previous");
  const [back, next] = [step(-1), step(1)];
  const place = h("span", { class: "aside" });
  const dialog = open("", h("div", { class: "reader-in" }, h("div", { class: "reader-nav" }, back, next, place), body), { wide: true });
  const title = dialog.querySelector("h2");

  async function show(wanted) {
    if (wanted < 0 || wanted >= heads.length) return;
    index = wanted;
    const head = heads[index];
    setText(title, `Task ${task(head.task_id)}, sample ${head.sample}`);
    setText(place, `${index + 1} of ${plural(heads.length, "trajectory", "trajectories")}`);
    back.disabled = index === 0;
    next.disabled = index === heads.length - 1;
    try {
      const one = await read(`v1/trajectories/${head.task_id}/${head.sample}`);
      if (heads[index] === head) body.replaceChildren(...content(one));
    } catch (error) {
      refused(error);
      if (heads[index] !== head) return;
      body.replaceChildren(...(error.status === 404 ? left(head) : [h("p", { class: "problem" }, error.message)]));
    }
  }

  dialog.addEventListener("keydown", (event) => {
    if (event.key === "j") show(index + 1);
    if (event.key === "k") show(index - 1);
  });
  show(index);
}
