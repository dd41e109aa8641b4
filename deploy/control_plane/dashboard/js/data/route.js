// Which view of the page is shown, and of which runs: in the address, so that a link leads to the same place.
// #/metrics?run=first&run=second, #/groups/12/345?run=first

import { byId, h, setAttribute } from "../elements/dom.js";

/** Views in the order of their tabs: [name, title, whether it needs a run's broker]. */
const VIEWS = [
  ["overview", "Overview", true], ["metrics", "Metrics"], ["groups", "Groups"], ["evaluations", "Evaluations"],
  ["playground", "Playground", true], ["machine", "Machine"], ["logs", "Logs"], ["setup", "Setup"], ["runs", "Runs"],
];
const shows = new Map();
const hides = new Map();
let fallback = "overview";
let current = null;

/** What the address says: {view, parts, query}. */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...parts] = path.split("/").map(decodeURIComponent);
  return { view: VIEWS.some(([name]) => name === view) ? view : fallback, parts, query: new URLSearchParams(query) };
}

/** The address of a view; the runs stay the same unless others are given. */
export function link(view, parts = [], runs = place().query.getAll("run")) {
  const query = new URLSearchParams(runs.map((run) => ["run", run])).toString();
  return `#/${[view, ...parts].map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

export const go = (...where) => (location.hash = link(...where));

/** show(parts) is called when the view is opened, or what it shows changes; hide() when another one is. */
export function register(view, show, hide = () => {}) {
  shows.set(view, show);
  hides.set(view, hide);
}

function follow() {
  const { view, parts } = place();
  if (current !== view) hides.get(current)?.();
  current = view;
  for (const [name] of VIEWS) byId(`view-${name}`).hidden = name !== view;
  for (const tab of byId("views").children) {
    const [, mine] = tab.id.split("tab-");
    setAttribute(tab, "aria-current", mine === view ? "page" : null);
    setAttribute(tab, "href", link(mine));
    if (mine === view) byId("views").scrollLeft = tab.offsetLeft + tab.offsetWidth / 2 - byId("views").clientWidth / 2;
  }
  shows.get(view)?.(parts);
}

/** Begin to follow the address. live: whether this server watches a run's broker; playground: and may ask its policy. */
export function start(live, playground) {
  fallback = live ? "overview" : "runs";
  byId("views").replaceChildren(...VIEWS.filter(([name, , broker]) => (live || !broker) && (playground || name !== "playground"))
    .map(([name, title]) => h("a", { id: `tab-${name}`, href: link(name) }, title)));
  window.addEventListener("hashchange", follow);
  follow();
}

export const again = follow;
