// Dialogs: one question at a time, answered by keyboard or pointer; a refused is shown where the question was.

import { refused } from "../data/api.js";
import { byId, h, setText } from "./dom.js";

let fade = 0;

/** A line at the foot of the page that goes away by itself. */
export function notice(text, kind = "good") {
  const element = byId("notice");
  element.dataset.kind = kind;
  setText(element, text);
  element.classList.add("is-on");
  clearTimeout(fade);
  fade = setTimeout(() => element.classList.remove("is-on"), 6000);
}

/** Open a dialog with this content; it is gone from the page when it closes. */
export function open(title, content, { wide = false, onclose } = {}) {
  const label = `dialog-${Math.random().toString(36).slice(2)}`;
  const dialog = h("dialog", { class: wide ? "drawer" : "dialog", "aria-labelledby": label },
    h("div", { class: "dialog-head" },
      h("h2", { id: label }, title),
      h("button", { type: "button", class: "button icon quiet-button", "aria-label": "Close", onclick: () => dialog.close() },
        "✕")),
    content);
  dialog.addEventListener("close", () => {
    dialog.remove();
    onclose?.();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  byId("dialogs").append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Ask before something is done. body: what will happen, as elements; verb: on the button; act: does it and returns
 * what to say afterwards. The dialog stays open with the reason when act is refused.
 */
export function confirm({ title, body, verb, danger = false, act }) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const go = h("button", { type: "submit", class: `button ${danger ? "danger" : "primary"}` }, verb);
  const form = h("form", { class: "dialog-body" }, body, problem,
    h("div", { class: "dialog-foot" },
      h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Cancel"), go));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    problem.hidden = true;
    try {
      const text = await act(new FormData(form));
      dialog.close();
      if (text) notice(text);
    } catch (error) {
      refused(error);
      setText(problem, error.status === 401 ? "The token is not right any more: reload the page." : error.message);
      problem.hidden = false;
    } finally {
      go.disabled = false;
    }
  });
  const dialog = open(title, form);
  (form.querySelector("[autofocus]") ?? go).focus();
  return dialog;
}
