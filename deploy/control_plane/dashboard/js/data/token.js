// Asks for the control plane's token when it wants one. It is kept for this tab only, and forgotten with it.

import { read, refused, token } from "./api.js";
import { h } from "../elements/dom.js";
import { open } from "../elements/dialogs.js";

let asking = null;

/** Ask once, however often this is called meanwhile; then() follows a token that was accepted. */
export function askForToken(then) {
  if (asking) return;
  const wrong = token.get() !== null;
  token.forget();
  const field = h("input", { type: "password", name: "token", autocomplete: "off", required: true, id: "token-field" });
  const problem = h("p", { class: "problem", role: "alert", hidden: !wrong }, wrong ? "That token was not accepted." : "");
  const form = h("form", { class: "dialog-body" },
    h("p", null, "It is in ", h("code", null, "control_token"), " in the run's folder, and in the link that ",
      h("code", null, "tidemill up"), " prints; or it is the one you set as ", h("code", null, "TIDEMILL_CONTROL_TOKEN"),
      ". It stays in this tab."),
    h("label", { for: "token-field" }, "Token"), field, problem,
    h("div", { class: "dialog-foot" }, h("button", { type: "submit", class: "button primary" }, "Open the run")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    try {
      await read("v1/services");
    } catch (error) {
      refused(error);
      if (error.status === 401) {
        token.forget();
        problem.textContent = "That token was not accepted.";
        problem.hidden = false;
        field.select();
        return;
      }
    }
    asking.close();
    then();
  });
  asking = open("This run wants its token", form, { onclose: () => (asking = null) });
  field.focus();
}
