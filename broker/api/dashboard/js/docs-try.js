// The form below a route: its parameters, its body, the same request as a curl command, and what the server answered.

import { headers } from "./api.js";
import { h, setText } from "./dom.js";
import { boundsOf, example, fields, typeOf } from "./docs-schema.js";

/** A stream never ends: so much of it is shown. */
const STREAM_MS = 3000;
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function input(parameter, resolve) {
  const schema = parameter.schema ?? {};
  const options = [schema, ...(schema.anyOf ?? [])].find((one) => one.enum)?.enum;
  const name = `${parameter.in}:${parameter.name}`;
  const field = options
    ? h("select", { name }, h("option", { value: "" }, "any"), options.map((one) => h("option", { value: one }, one)))
    : h("input", { name, autocomplete: "off", required: parameter.required, placeholder: typeOf(schema, resolve), spellcheck: "false" });
  const note = [parameter.description ?? schema.description, boundsOf(schema)].filter(Boolean).join(" ");
  return h("label", { class: "filter" },
    h("span", null, h("code", null, parameter.name), parameter.required ? " required" : ""), field,
    h("span", { class: "aside" }, note));
}

/** The request that the form describes: {url, method, headers, body}. */
function request(form, method, path) {
  const query = new URLSearchParams();
  const extra = {};
  let target = path;
  for (const element of form.elements) {
    const [place, name] = (element.name ?? "").split(":");
    const value = element.value?.trim();
    if (!name || (value === "" && place !== "path")) continue;
    if (place === "path") target = target.replace(`{${name}}`, encodeURIComponent(value) || `{${name}}`);
    if (place === "query") query.append(name, value);
    if (place === "header") extra[name] = value;
  }
  const body = form.elements.body?.value.trim() || undefined;
  if (body) extra["Content-Type"] = "application/json";
  const search = query.toString();
  return { url: target.slice(1) + (search ? `?${search}` : ""), method, headers: extra, body };
}

/** The same as a shell command. */
function curl({ url, method, headers: extra, body }, guarded) {
  const parts = ["curl", ...(method === "GET" ? [] : ["-X", method]), quoted(new URL(url, document.baseURI).href)];
  if (guarded) parts.push("-H", '"Authorization: Bearer $TIDEMILL_CONTROL_TOKEN"');
  for (const [name, value] of Object.entries(extra)) parts.push("-H", quoted(`${name}: ${value}`));
  if (body) parts.push("-d", quoted(body));
  return parts.join(" ");
}

async function text(response, stop) {
  if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
    const plain = await response.text();
    try {
      return JSON.stringify(JSON.parse(plain), null, 2);
    } catch {
      return plain;
    }
  }
  setTimeout(() => stop.abort(), STREAM_MS);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let read = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) read += part.value;
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  return `${read}… and so on: the stream has no end.`;
}

/** The form of one route. guarded(): whether a token is needed; refused(): what to do when it was not accepted. */
export function tryForm(method, path, operation, resolve, { guarded, refused }) {
  const content = operation.requestBody?.content?.["application/json"]?.schema;
  const options = content?.anyOf ? content.anyOf[0] : content;
  const body = options && h("label", { class: "filter" }, h("span", null, "Body, JSON"),
    h("textarea", { name: "body", rows: 5, spellcheck: "false", value: JSON.stringify(example(options, resolve), null, 2) }));
  const go = h("button", { type: "submit", class: `button ${method === "GET" ? "primary" : "danger"}` },
    method === "GET" ? "Send" : "Send this order");
  const command = h("pre", { class: "docs-curl", tabindex: "0", "aria-label": "The same with curl" });
  const status = h("p", { class: "docs-status", role: "status" });
  const answer = h("pre", { class: "docs-answer", tabindex: "0", "aria-label": "The answer", hidden: true });
  const form = h("form", { class: "docs-form" },
    h("div", { class: "docs-inputs" }, (operation.parameters ?? []).map((one) => input(one, resolve))),
    body, options && fields(options, resolve), command, h("div", { class: "docs-send" }, go, status), answer);
  const show = () => setText(command, curl(request(form, method, path), guarded()));
  form.addEventListener("input", show);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { url, ...rest } = request(form, method, path);
    const stop = new AbortController();
    const began = performance.now();
    go.disabled = true;
    setText(status, "waiting for the answer");
    try {
      const response = await fetch(url, { ...rest, headers: headers(rest.headers), signal: stop.signal, cache: "no-store" });
      setText(answer, await text(response, stop));
      setText(status, `${response.status} ${response.statusText} in ${Math.round(performance.now() - began)} ms`);
      status.dataset.good = response.ok;
      answer.hidden = false;
      if (response.status === 401) refused();
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      setText(status, "The control plane does not answer.");
      status.dataset.good = false;
    } finally {
      go.disabled = false;
    }
  });
  show();
  return form;
}
