// Talk to the current policy: a conversation or a text to continue, its tokens coloured by how likely each was.

import { ask, refused } from "../data/api.js";
import { byId, h, setAttribute, setText } from "../elements/dom.js";
import { figure, percent } from "../elements/format.js";
import { register } from "../data/route.js";
import { legend, shades } from "../elements/shades.js";

let turns = [];
let busy = false;

const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");

function told(table, index) {
  const facts = [`id ${table.id[index]}`, `version ${table.version[index]}`];
  if (table.text) facts.unshift(JSON.stringify(table.text[index]));
  const logprob = table.logprob[index];
  return logprob === null ? facts.join(" · ") : `${facts.join(" · ")} · log-probability ${figure(logprob)} · probability ${percent(Math.exp(logprob))}`;
}

function reply({ text, finish, tokens }, generator) {
  const names = shades("logprob", tokens);
  const line = h("p", { class: "token-line", role: "status" }, `${tokens.id.length} tokens by ${generator}, ended by ${finish}. Point at a token, or use the arrow keys.`);
  const spans = tokens.id.map((id, index) => h("span", { class: "token", "data-shade": names[index], "data-index": index },
    tokens.text ? visible(tokens.text[index]) : `${id} `));
  let chosen = -1;
  const choose = (index) => {
    spans[chosen]?.classList.remove("is-chosen");
    chosen = Math.max(0, Math.min(spans.length - 1, index));
    spans[chosen].classList.add("is-chosen");
    setText(line, told(tokens, chosen));
  };
  const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the answer; arrow keys walk through them" },
    h("div", { class: "turn-text" }, spans));
  box.addEventListener("pointerover", (event) => event.target.dataset.index && setText(line, told(tokens, Number(event.target.dataset.index))));
  box.addEventListener("click", (event) => event.target.dataset.index && choose(Number(event.target.dataset.index)));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !spans.length) return;
    event.preventDefault();
    choose(chosen + by);
  });
  return [tokens.text ? null : h("pre", { tabindex: "0" }, text), box, line].filter(Boolean);
}

function draw() {
  byId("play-turns").replaceChildren(...turns.map(({ role, content, shown }) => h("li", { class: "play-turn", "data-role": role },
    h("b", null, role), h("div", null, shown ?? h("pre", { class: "play-said" }, content)))));
  byId("play-keys").replaceChildren(...(turns.some((turn) => turn.shown)
    ? legend("logprob", { mask: [1], version: [0], logprob: [0] }).map(([name, text]) => h("span", { class: "key-token" }, h("i", { class: "token", "data-shade": name }), text)) : []));
  byId("play-clear").disabled = !turns.length;
}

async function send(event) {
  event.preventDefault();
  const form = new FormData(byId("play-form"));
  const text = form.get("text");
  if (busy || !text) return;
  const chat = form.get("as") === "chat";
  const said = { role: chat ? "user" : "text", content: text };
  const before = turns;
  turns = chat ? [...turns.filter((turn) => turn.role !== "text"), said] : [said];
  busy = true;
  setAttribute(byId("play-send"), "disabled", "");
  setText(byId("play-note"), "A generator answers when it has room beside training.");
  draw();
  const given = { max_tokens: Number(form.get("max_tokens")), temperature: Number(form.get("temperature")), wait_s: 14 };
  try {
    const answer = await ask("POST", "v1/generate", { ...given, ...(chat ? { messages: turns.map(({ role, content }) => ({ role, content })) } : { prompt: text }) });
    const [first] = answer.replies;
    turns = [...turns, { role: "assistant", content: first.text, shown: reply(first, answer.generator) }];
    byId("play-text").value = chat ? "" : text;
    setText(byId("play-note"), "");
  } catch (error) {
    refused(error);
    turns = before;
    setText(byId("play-note"), error.message);
  } finally {
    busy = false;
    setAttribute(byId("play-send"), "disabled", null);
    draw();
  }
}

/** Let the form begin with a message, or with a text if the model has no chat template. */
export function choosePrompt(chat) {
  byId("play-form").elements.as.value = chat ? "chat" : "text";
}

export function start() {
  register("playground", draw);
  byId("play-form").addEventListener("submit", send);
  byId("play-clear").addEventListener("click", () => {
    turns = [];
    draw();
  });
}
