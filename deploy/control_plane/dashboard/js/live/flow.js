// The run as a picture: services as boxes, streams as arrows with their rates and lags, the bottleneck marked.

import { byId, s, setAttribute, setText } from "../elements/dom.js";
import { facts } from "./flow-facts.js";
import { layoutFor } from "./flow-layout.js";
import { on, store } from "../data/store.js";

const LINE = 17;
let layout = null;
let parts = null;

function drawNode(name, [x, y, width, height]) {
  const text = (className, dy) => s("text", { class: className, x: x + 16, y: y + dy });
  const figure = s("tspan", { class: "node-figure" });
  const unit = s("tspan", { class: "node-unit", dx: 5 });
  const line = text("", 58);
  line.append(figure, unit);
  const title = text("node-title", 28);
  const note = text("node-note", 80);
  const bar = s("rect", { class: "node-load", x: x + 16, y: y + height - 16, width: 0, height: 4, rx: 2 });
  const track = s("rect", { class: "node-track", x: x + 16, y: y + height - 16, width: width - 32, height: 4, rx: 2 });
  // In a column an arrow comes from above: the tag makes room for it.
  const middle = layout.gap ? x + width / 2 : x + width - 58;
  const tag = s("g", { class: "tag" },
    s("rect", { x: middle - 48, y: y - 12, width: 96, height: 23, rx: 11.5 }),
    s("text", { x: middle, y: y + 4, "text-anchor": "middle" }, "Bottleneck"));
  const group = s("g", { class: "node", "data-node": name },
    s("rect", { class: "node-box", x, y, width, height, rx: 12 }), title, line, note, track, bar, tag);
  return { group, title, figure, unit, note, bar, track, room: width - 32 };
}

function drawEdge(name, { path, words, flat }) {
  const [x, y, anchor] = words;
  const line = s("path", { class: "edge-line", d: path, "marker-end": "url(#head)" });
  const flow = s("path", { class: "edge-flow", d: path });
  const group = s("g", { class: "edge", "data-edge": name }, line, flow);
  const turned = anchor === "vertical";
  const place = (dy) => ({
    x, y: y + dy, "text-anchor": turned ? "middle" : anchor, transform: turned ? `rotate(-90 ${x} ${y})` : null,
  });
  if (flat) {
    const label = s("text", place(0), s("tspan", { class: "edge-name" }), s("tspan", { class: "edge-note", dx: 8 }));
    group.append(label);
    return { group, flow, name: label.firstChild, notes: [label.lastChild], flat };
  }
  // Over the line its name and rate, under it what waits; beside it, when the line runs down.
  const below = layout.gap ? [-22, -4, 46, 64, 82] : [0, LINE, 2 * LINE, 3 * LINE, 4 * LINE];
  const texts = ["edge-name", "edge-rate", "edge-note", "edge-note", "edge-note"].map((className, index) =>
    s("text", { class: className, ...place(below[index]) }));
  group.append(...texts);
  return { group, flow, name: texts[0], notes: texts.slice(1), flat };
}

function draw(host, chosen) {
  layout = chosen;
  const [width, height] = layout.box;
  const nodes = Object.fromEntries(Object.entries(layout.nodes).map(([name, box]) => [name, drawNode(name, box)]));
  const edges = Object.fromEntries(Object.entries(layout.edges).map(([name, edge]) => [name, drawEdge(name, edge)]));
  const head = s("marker", {
    id: "head", viewBox: "0 0 10 10", refX: 8, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse",
  }, s("path", { class: "edge-head", d: "M1 1L9 5L1 9" }));
  const svg = s("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "The flow" },
    s("defs", null, head), ...Object.values(edges).map((edge) => edge.group),
    ...Object.values(nodes).map((node) => node.group));
  host.replaceChildren(svg);
  parts = { svg, nodes, edges };
}

/** Seconds that the dashes take for one length of theirs: fast where much goes through. */
const pace = (rate) => Math.min(4, Math.max(0.35, 3 / Math.sqrt(rate + 0.1)));

function update() {
  if (!store.status || !parts) return;
  const { nodes, edges, mark, moving, words } = facts(store.status);
  setAttribute(parts.svg, "aria-label", words);
  for (const [name, node] of Object.entries(nodes)) {
    const drawn = parts.nodes[name];
    setText(drawn.title, node.title);
    setText(drawn.figure, node.figure);
    setText(drawn.unit, node.unit);
    setText(drawn.note, node.note);
    setAttribute(drawn.bar, "width", Math.round(drawn.room * (node.load ?? 0)));
    setAttribute(drawn.track, "visibility", node.load === null || node.load === undefined ? "hidden" : "visible");
    setAttribute(drawn.group, "data-missing", node.missing ? "" : null);
    setAttribute(drawn.group, "data-awaited", node.awaited ? "" : null);
    setAttribute(drawn.group, "data-mark", mark === name ? "" : null);
  }
  for (const [name, edge] of Object.entries(edges)) {
    const drawn = parts.edges[name];
    if (!edge) continue;
    setText(drawn.name, edge.name);
    if (drawn.flat) setText(drawn.notes[0], edge.lines.join(" · "));
    else {
      const [rate, wait, taken, lag] = edge.lines;
      const lines = layout.split ? [rate, wait, taken, lag] : [rate, `${wait} · ${taken}`, lag];
      drawn.notes.forEach((note, index) => setText(note, lines[index] ?? ""));
    }
    const runs = moving && edge.rate > 0;
    setAttribute(drawn.group, "data-runs", runs ? "" : null);
    setAttribute(drawn.group, "data-mark", mark === name ? "" : null);
    if (runs) {
      // A new duration makes the dashes jump: change it only when it differs enough to be seen.
      const wanted = pace(name === "weights" ? edge.rate / 10 : edge.rate);
      const now = parseFloat(drawn.flow.style.animationDuration) || 0;
      if (Math.abs(wanted - now) > now * 0.3) drawn.flow.style.animationDuration = `${wanted.toFixed(2)}s`;
    }
  }
}

export function start() {
  const host = byId("picture");
  new ResizeObserver(() => {
    const chosen = layoutFor(host.clientWidth);
    if (chosen !== layout) {
      draw(host, chosen);
      update();
    }
  }).observe(host);
  on("status", update);
}
