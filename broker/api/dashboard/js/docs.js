// The page at /docs: every route of the OpenAPI document, what it takes and answers, and a form to try it.

import { Refused, read, token } from "./api.js";
import { fields, resolver } from "./docs-schema.js";
import { tryForm } from "./docs-try.js";
import { byId, h, setText } from "./dom.js";
import { askForToken } from "./token.js";

const METHODS = ["get", "post", "patch", "put", "delete"];
const TITLES = { reading: "Reading", orders: "Orders", "dead letters": "Dead letters", probes: "Probes and metrics" };
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
const idOf = (method, path) => slug(`${method} ${path}`);

/** [{tag, routes: [{method, path, operation}]}] in the order of the document. */
function grouped(document) {
  const groups = new Map();
  for (const [path, item] of Object.entries(document.paths)) {
    for (const method of METHODS.filter((name) => item[name])) {
      const tag = item[method].tags?.[0] ?? "others";
      groups.set(tag, [...(groups.get(tag) ?? []), { method, path, operation: item[method] }]);
    }
  }
  return [...groups].map(([tag, routes]) => ({ tag, routes }));
}

/** Words between backticks are code. */
const prose = (text) => text.split(/`+/).map((part, index) => (index % 2 ? h("code", null, part) : part));

function answers(operation, resolve) {
  return h("ul", { class: "docs-answers" }, Object.entries(operation.responses).map(([status, one]) => {
    const [[type, media] = ["", {}]] = Object.entries(one.content ?? {});
    const good = status.startsWith("2");
    return h("li", null,
      h("div", { class: "docs-code" }, h("b", { "data-good": String(good) }, status), 
        h("span", null, prose(one.description.replace("Successful Response", ""))),
        h("code", { class: "aside" }, type)),
      good && type === "application/json" ? fields(media.schema, resolve) : null);
  }));
}

function route({ method, path, operation }, resolve) {
  const details = h("details", { class: "route", id: idOf(method, path), "data-words": `${method} ${path} ${operation.description ?? ""}`.toLowerCase() },
    h("summary", null,
      h("b", { class: "method", "data-method": method }, method.toUpperCase()), h("code", null, path),
      h("span", null, prose((operation.description ?? operation.summary ?? "").split("\n")[0]))));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const guarded = () => token.get() !== null;
    const refused = () => askForToken(() => {});
    details.append(h("div", { class: "route-in" },
      h("h3", null, "Try it"), tryForm(method.toUpperCase(), path, operation, resolve, { guarded, refused }),
      h("h3", null, "Answers"), answers(operation, resolve)));
  });
  return details;
}

function show(document) {
  const resolve = resolver(document);
  const groups = grouped(document);
  setText(byId("intro"), `${document.info.description} Version ${document.info.version}.`);
  byId("routes").replaceChildren(...groups.map(({ tag, routes }) =>
    h("section", { class: "panel", id: slug(tag), "aria-labelledby": `title-${slug(tag)}` },
      h("div", { class: "panel-head" }, h("h2", { id: `title-${slug(tag)}` }, TITLES[tag] ?? tag)),
      routes.map((one) => route(one, resolve)))));
  byId("contents").replaceChildren(...groups.map(({ tag, routes }) => h("div", null,
    h("a", { class: "docs-tag", href: `#${slug(tag)}` }, TITLES[tag] ?? tag),
    routes.map(({ method, path }) => h("a", { href: `#${idOf(method, path)}` },
      h("b", { class: "method", "data-method": method }, method.toUpperCase()), path.replace("/v1", ""))))));
  // Links can carry no token.
  byId("document").hidden = token.get() !== null;
  openTarget();
}

/** A link to a route opens it. */
function openTarget() {
  const found = byId(location.hash.slice(1));
  if (found?.matches("details")) {
    found.open = true;
    found.scrollIntoView();
  }
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const section of byId("routes").children) {
    const routes = [...section.querySelectorAll(".route")];
    for (const one of routes) one.hidden = !one.dataset.words.includes(wanted);
    section.hidden = routes.every((one) => one.hidden);
  }
}

async function load() {
  try {
    show(await read("openapi.json"));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status === 401) askForToken(load);
    else setText(byId("intro"), `The document cannot be read: ${error.message}`);
  }
}

byId("filter").addEventListener("input", filter);
addEventListener("hashchange", openTarget);
load();
