// The charts of the run: reward, also on held-out prompts, tokens a second, the gap between trainer and rollout, and staleness.

import { LineChart } from "../elements/charts.js";
import { byId, h, keyed, setAttribute, setText } from "../elements/dom.js";
import { count, figure, percent, plural, short, small } from "../elements/format.js";
import { on, setAxis, store } from "../data/store.js";

const SMOOTH = 20;
/** A divergence below this is what is left of the same weights on both sides. */
const ROUNDING = 1e-9;
const MANY = 3 * SMOOTH;

/** Running mean of the last `width` values; nulls are left out. */
export function smooth(values, width) {
  let sum = 0;
  let known = 0;
  return values.map((value, index) => {
    if (value !== null) [sum, known] = [sum + value, known + 1];
    const old = index >= width ? values[index - width] : null;
    if (old !== null) [sum, known] = [sum - old, known - 1];
    return known ? sum / known : null;
  });
}

/** Seconds of training at each step. A trainer that took over counts from zero again: its time is added. */
export function trainingTime(walls) {
  let before = 0;
  let last = 0;
  return walls.map((wall) => {
    if (wall === null) return before + last;
    if (wall < last) before += last;
    last = wall;
    return before + wall;
  });
}

const column = (name) => store.metrics.series[name] ?? store.metrics.step.map(() => null);
const horizontal = () => (store.axis === "step" ? store.metrics.step : trainingTime(column("wall_s")));

function showReward(chart) {
  const { step } = store.metrics;
  const means = new Map(store.evaluations.filter((one) => one.complete && one.mean !== null).map((one) => [one.version, one.mean]));
  const reward = column("reward/mean");
  const heldout = step.map((number) => means.get(number) ?? null);
  const x = [...horizontal()];
  const smoothed = reward.length >= MANY ? smooth(reward, SMOOTH) : reward;
  const raw = reward.length >= MANY ? reward : reward.map(() => null);
  const columns = [[...raw], [...smoothed], heldout];
  // The evaluation of the first model comes before the first step.
  if (means.has(0) && step[0] > 0) {
    x.unshift(0);
    columns.forEach((one, index) => one.unshift(index === 2 ? means.get(0) : null));
  }
  const last = (values) => figure(values.findLast((value) => value !== null));
  chart.show({
    x, columns, axis: store.axis,
    words: `Over ${plural(step.length, "step")}: reward ${last(reward)} now, ${figure(reward[0])} at first; ` +
      `in evaluations ${last(heldout)}.`,
  });
}

function showGap(chart) {
  const tokens = column("train/logprob_gap_tokens");
  // Without a token of the trainer's own version in the batch there is no gap to tell; a logarithm knows no zero.
  const measured = (name) => column(name).map((value, index) => (tokens[index] === 0 || !(value > 0) ? null : value));
  const mean = measured("train/logprob_gap_mean");
  const most = measured("train/logprob_gap_max");
  const kl = column("train/kl").map((value) => (value > ROUNDING ? value : null));
  const last = (values) => small(values.findLast((value) => value !== null) ?? null);
  chart.show({
    x: horizontal(), columns: [mean, most, kl], axis: store.axis,
    words: `Log-probability of the same tokens by the same weights, trainer against generator: ` +
      `mean difference ${last(mean)}, largest ${last(most)}; divergence between the policies ${last(kl)}.`,
  });
}

function showTokens(chart) {
  const { ticks } = store;
  const now = ticks.at(-1);
  chart.show({
    x: ticks.map((tick) => tick.time), columns: [ticks.map((tick) => tick.generated), ticks.map((tick) => tick.trained)],
    axis: "clock", words: `${short(now?.generated)} tokens a second generated, ${short(now?.trained)} trained.`,
  });
}

function showStaleness() {
  const { bound, mean, max, histogram, steps } = store.status.staleness;
  const host = byId("histogram");
  const total = Object.values(histogram).reduce((sum, tokens) => sum + tokens, 0);
  setText(byId("staleness-aside"),
    total ? `mean ${figure(mean, 2)}, max ${max} of ${bound} versions` : `bound ${bound} versions`);
  const oldest = Math.max(bound, ...Object.keys(histogram).map(Number));
  const ages = total ? Array.from({ length: Math.min(oldest + 1, 24) }, (_, age) => ({ age, tokens: histogram[age] ?? 0 })) : [];
  const most = Math.max(1, ...ages.map((one) => one.tokens));
  if (!host.children.length) host.append(h("div", { class: "bars", role: "img" }), h("p", { class: "empty" }));
  const [bars, note] = host.children;
  setText(note, total
    ? `Age of ${short(total)} trained tokens, in weight versions, over the last ${plural(steps, "step")}`
    : "No step has been trained yet.");
  setAttribute(bars, "aria-label",
    `Staleness of tokens in versions: ${ages.map((one) => `${one.age}: ${percent(one.tokens / (total || 1))}`).join(", ")}`);
  keyed(bars, ages, (one) => one.age,
    (one) => h("div", { class: "bar-of" }, h("span", { class: "bar-value" }), h("i"), h("span", { class: "bar-age" }, one.age)),
    (element, one) => {
      setText(element.firstChild, percent(one.tokens / total));
      element.title = `${plural(one.tokens, "token")} of age ${one.age}`;
      element.children[1].style.setProperty("--share", (100 * one.tokens) / most);
      setAttribute(element, "data-over", one.age > bound ? "" : null);
    });
}

export function start() {
  const reward = new LineChart(byId("chart-reward"), {
    zero: true, empty: "No step has been trained yet.",
    series: [
      { label: "each step", colour: "--blue", alpha: 0.3, width: 1, value: (v) => figure(v) },
      { label: "reward", colour: "--blue", width: 2, value: (v) => figure(v) },
      { label: "held-out reward", colour: "--orange", points: true, value: (v) => figure(v) },
    ],
  });
  const gap = new LineChart(byId("chart-gap"), {
    log: true, empty: "No step has been trained yet.",
    series: [
      { label: "gap, mean", colour: "--blue", value: small },
      { label: "gap, largest", colour: "--orange", width: 1.25, value: small },
      { label: "divergence (KL)", colour: "--violet", width: 1.25, value: small },
    ],
  });
  const tokens = new LineChart(byId("chart-tokens"), {
    zero: true, empty: "Collecting, one look a second.",
    series: [
      { label: "generated", colour: "--blue", fill: true, value: count },
      { label: "trained", colour: "--green", value: count },
    ],
  });
  on("metrics", () => [showReward(reward), showGap(gap)]);
  on("evaluations", () => showReward(reward));
  on("status", () => [showTokens(tokens), showStaleness()]);
  on("axis", () => {
    for (const button of byId("axis").children) setAttribute(button, "aria-pressed", button.dataset.axis === store.axis);
    showReward(reward);
    showGap(gap);
  });
  byId("axis").addEventListener("click", (event) => event.target.dataset.axis && setAxis(event.target.dataset.axis));
}
