// What the page knows of the run, and who wants to hear of it. Parts subscribe to: status, metrics, evaluations,
// events, link, axis.

const KEEP_TICKS = 900;
const KEEP_EVENTS = 400;
const KEEP_STEPS = 10000;

export const store = {
  status: null,
  link: { state: "waiting", since: Date.now() },
  axis: "step",
  metrics: { step: [], series: {}, staleness: [] },
  evaluations: [],
  events: [],
  /** One look a second: {time, generated, trained, services: {name: figure}}. */
  ticks: [],
};

const listeners = new Map();

export function on(topic, listener) {
  listeners.set(topic, [...(listeners.get(topic) ?? []), listener]);
}

export function emit(topic) {
  for (const listener of listeners.get(topic) ?? []) listener(store);
}

/** How busy a service is: tokens a second, else what it counts. */
function activity(service) {
  if (service.role === "generator" || service.role === "trainer") return service.tokens_per_s;
  return service.figures.ok ?? service.figures.cursor ?? null;
}

export function addStatus(status) {
  const last = store.ticks.at(-1);
  store.status = status;
  if (!last || status.time > last.time) {
    store.ticks.push({
      time: status.time,
      generated: status.state === "unreachable" ? null : status.throughput.generated_tokens,
      trained: status.state === "unreachable" ? null : status.throughput.trained_tokens,
      services: Object.fromEntries(status.services.map((service) => [service.name, activity(service)])),
    });
    if (store.ticks.length > KEEP_TICKS) store.ticks.splice(0, store.ticks.length - KEEP_TICKS);
  }
  emit("status");
}

/** Looks from before the page was opened, or while it was cut off: {time, generated_tokens, trained_tokens}. */
export function addPast({ time, generated_tokens: generated, trained_tokens: trained }) {
  const own = new Map(store.ticks.map((tick) => [Math.round(tick.time), tick]));
  const past = time.map((at, index) => own.get(Math.round(at)) ??
    { time: at, generated: generated[index], trained: trained[index], services: {} });
  const last = time.at(-1) ?? 0;
  store.ticks = past.concat(store.ticks.filter((tick) => tick.time > last)).slice(-KEEP_TICKS);
}

/** Columns as the server sends them; steps that were trained again replace themselves and what came after. */
export function addMetrics(more) {
  const { step, series, staleness } = store.metrics;
  if (!more.step.length) return;
  let keep = step.length;
  while (keep && step[keep - 1] >= more.step[0]) keep--;
  const drop = Math.max(0, keep + more.step.length - KEEP_STEPS);
  const join = (old, add) => old.slice(drop, keep).concat(add);
  for (const name of new Set([...Object.keys(series), ...Object.keys(more.series)])) {
    series[name] = join(
      series[name] ?? Array(step.length).fill(null),
      more.series[name] ?? Array(more.step.length).fill(null),
    );
  }
  store.metrics = { step: join(step, more.step), series, staleness: join(staleness, more.staleness) };
  emit("metrics");
}

/** Load everything again, after a connection was lost. */
export function replaceMetrics(all) {
  store.metrics = { step: [], series: {}, staleness: [] };
  if (all.step.length) addMetrics(all);
  else emit("metrics");
}

export function setEvaluations(evaluations) {
  store.evaluations = evaluations;
  emit("evaluations");
}

export function addEvents(events) {
  const known = new Set(store.events.map((event) => event.id));
  const fresh = events.filter((event) => !known.has(event.id));
  if (!fresh.length) return;
  store.events = store.events.concat(fresh).slice(-KEEP_EVENTS);
  emit("events");
}

export function setLink(state) {
  if (store.link.state !== state) store.link = { state, since: Date.now() };
  emit("link");
}

export function setAxis(axis) {
  store.axis = axis;
  emit("axis");
}
