// The bar and what is right below it: state, connection, the banner when something is wrong, and the run in figures.

import { token } from "../data/api.js";
import { byId, h, keyed, setAttribute, setText } from "../elements/dom.js";
import { count, duration, figure, percent, plural, share, short, timeOfDay, bytes } from "../elements/format.js";
import { spark } from "../elements/spark.js";
import { on, store } from "../data/store.js";

const OVER = ["stopped", "finished", "failed"];
const LINK_WORDS = { waiting: "connecting", live: "live", lost: "offline", refused: "token needed" };

function showLink() {
  const { state, since } = store.link;
  const element = byId("link");
  setAttribute(element, "data-link", state);
  setText(element.lastElementChild, LINK_WORDS[state]);
  document.body.classList.toggle("is-offline", state === "lost" || state === "refused");
  showBanner(state, since);
}

/** A line if the page or the run needs attention; empty otherwise. */
function trouble(link, since) {
  const { status } = store;
  if (link === "lost") {
    const seen = status ? ` What you see is from ${timeOfDay(status.time)}.` : "";
    return ["bad", `The control plane has not answered for ${duration((Date.now() - since) / 1000)}. Trying again.${seen}`];
  }
  if (link === "refused") return ["warn", "This control plane wants its token."];
  if (!status) return null;
  if (status.state === "failed") return ["bad", `The run failed: ${status.cause || "no cause is known"}`];
  if (status.state === "unreachable") return ["bad", `The broker does not answer: ${status.cause}`];
  if (status.state === "pausing" || status.state === "draining") return ["warn", `${status.state}: ${status.cause}`];
  if (status.state === "paused") {
    const { by, since: paused, mode } = status.pause;
    return ["warn", `Paused (${mode}) by ${by || "someone"} since ${timeOfDay(paused)}. Nothing is lost; resume when you like.`];
  }
  if (status.state === "stopping" || status.state === "finishing") return ["calm", `${status.state}: ${status.cause}`];
  if (!status.ledger.balanced) return ["bad", "The ledger does not add up: a group was lost or counted twice. Keep the logs."];
  return null;
}

function showBanner(link, since) {
  const found = trouble(link, since);
  const banner = byId("banner");
  banner.hidden = !found;
  if (!found) return;
  setAttribute(banner, "data-kind", found[0]);
  setText(banner, found[1]);
}

const series = (name) => (store.metrics.series[name] ?? []).slice(-120);

/** The figures at the top: {key, label, value, unit, note, share, points}. */
/** What became of most of the generated tokens, in words. */
function ends({ tokens, tokens_generated: total }) {
  const parts = Object.entries(tokens).filter(([, value]) => value > 0).sort(([, a], [, b]) => b - a).slice(0, 3);
  return parts.length ? `: ${parts.map(([how, value]) => `${percent(value / total)} ${how.replaceAll("_", " ")}`).join(", ")}` : "";
}

function figures(status) {
  const { throughput, staleness, evaluation, ledger } = status;
  const isAccuracy = (evaluation?.accuracy ?? null) !== null;
  return [
    {
      key: "step", label: "Step", value: count(status.step), unit: `of ${count(status.steps)}`,
      share: status.steps ? status.step / status.steps : 0,
      note: status.remaining_s !== null ? `${duration(status.remaining_s)} to go`
        : status.started === null ? "not begun yet" : OVER.includes(status.state) ? status.state
          : `running for ${duration(status.elapsed_s)}`,
    },
    { key: "reward", label: "Reward", value: figure(status.reward), note: "mean of the last step", points: series("reward/mean") },
    {
      key: "heldout", label: isAccuracy ? "Accuracy" : "Held-out reward",
      value: isAccuracy ? share(evaluation.accuracy) : figure(evaluation?.mean ?? null),
      note: evaluation ? `of version ${evaluation.version}${evaluation.off_version ? `, ${count(evaluation.off_version)} of other weights` : ""}`
        : "no evaluation yet",
      points: store.evaluations.filter((one) => one.complete && one.mean !== null).map((one) => one.accuracy ?? one.mean).slice(-60),
    },
    {
      key: "generated", label: "Generated", value: short(throughput.generated_tokens), unit: "tok/s",
      note: `${short(ledger.tokens_generated)} in all${ends(ledger)}`, points: store.ticks.slice(-120).map((tick) => tick.generated),
    },
    {
      key: "trained", label: "Trained", value: short(throughput.trained_tokens), unit: "tok/s",
      note: `${count(ledger.samples_trained)} samples in all`, points: store.ticks.slice(-120).map((tick) => tick.trained),
    },
    {
      key: "staleness", label: "Staleness", value: figure(staleness.mean, 2), unit: `of ${staleness.bound}`,
      note: staleness.max === null ? "nothing trained yet" : `oldest token ${plural(staleness.max, "version")}`,
      points: series("staleness/mean"),
    },
    {
      key: "slots", label: "Slots in use", value: count(ledger.active), unit: `of ${count(ledger.capacity)}`,
      share: ledger.capacity ? ledger.active / ledger.capacity : 0,
      note: `${count(ledger.trained)} groups trained`,
    },
  ];
}

function showFigures() {
  keyed(byId("figures"), figures(store.status), (one) => one.key,
    (one) => h("div", { class: "card", "data-figure": one.key },
      h("span", { class: "card-label" }, one.label),
      h("span", { class: "card-line" }, h("b", { class: "card-value" }), h("span", { class: "card-unit" })),
      h("span", { class: "card-note" }),
      one.share === undefined ? spark() : h("span", { class: "card-share", "aria-hidden": "true" }, h("i"))),
    (element, one) => {
      setText(element.querySelector(".card-value"), one.value);
      setText(element.querySelector(".card-unit"), one.unit ?? "");
      setText(element.querySelector(".card-note"), one.note);
      if (one.share === undefined) element.lastElementChild.show(one.points);
      else element.lastElementChild.firstChild.style.width = percent(Math.min(1, one.share)).replace(" ", "");
    });
}

function showStatus() {
  const { status } = store;
  setText(byId("run"), status.run);
  const title = `${status.state} · ${status.run} · Tidemill`;
  if (document.title !== title) document.title = title;
  const state = byId("state");
  setAttribute(state, "data-state", status.state);
  setText(state.lastElementChild, status.state);
  const bottleneck = byId("bottleneck");
  setAttribute(bottleneck, "data-limit", status.bottleneck.limit);
  setText(bottleneck, status.bottleneck.text);
  setText(byId("foot"),
    `${status.run} · trainer's leader term ${status.leader_term} · ${bytes(status.memory_bytes)} in the broker · ` +
      `${count(status.ledger.uncommitted_steps)} steps since the last checkpoint`);
  // Links can carry no token.
  byId("open-metrics").hidden = token.get() !== null;
  showFigures();
  showLink();
}

function switchTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme.trim() === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const theme = dark ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("tidemill-theme", theme);
  document.dispatchEvent(new Event("themechange"));
}

export function start() {
  on("status", showStatus);
  on("link", showLink);
  byId("theme").addEventListener("click", switchTheme);
  // A connection that is lost gets older without any news.
  setInterval(() => store.link.state === "lost" && showLink(), 1000);
}
