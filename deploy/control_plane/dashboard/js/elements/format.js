// Numbers, durations and names as text. null is always a dash: a figure that is not known is not zero.

export const DASH = "–";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 1234 as 1,234. */
export const count = (value) => (known(value) ? whole.format(value) : DASH);

/** A large number, short: 12,345 as 12.3k. */
export function short(value) {
  if (!known(value)) return DASH;
  for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return `${(value / (size === 1e4 ? 1e3 : size)).toFixed(1)}${name}`;
  return whole.format(value);
}

/** A rate: one decimal below 100. */
export const rate = (value) => (!known(value) ? DASH : value < 100 ? value.toFixed(1) : short(value));

/** A figure between about 0 and 1. */
export const figure = (value, digits = 3) => (known(value) ? value.toFixed(digits) : DASH);

/** Small figures over many orders of magnitude. */
export function small(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4 ? value.toExponential(1) : value.toPrecision(3);
}

/** A share that changes little is shown to a tenth of a percent. */
export const share = (value) => (known(value) ? `${(value * 100).toFixed(1)} %` : DASH);

export const percent = (value) => (known(value) ? `${Math.round(value * 100)} %` : DASH);

/** Seconds as 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 10) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Seconds that ticks of an axis stand at, in familiar units: 1:20, or 5 min, 2 h 5 min. */
export const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
export const timeTicks = (ticks) => ticks.map((tick) => tick === 0 ? "0"
  : ticks.every((one) => one % 60 === 0) ? duration(tick).replace(/ 0 (s|min|h)$/, "")
  : `${Math.floor(tick / 60)}:${String(tick % 60).padStart(2, "0")}`);

export function bytes(value) {
  if (!known(value)) return DASH;
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return `${(value / size).toFixed(1)} ${name}`;
  return `${value} B`;
}

/** Unix seconds as the time of day. */
export const timeOfDay = (time) => (known(time) ? clock.format(new Date(time * 1000)) : DASH);

/** 1 group, 2 groups. */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Evaluation tasks are numbered (version + 1) * 2^32 + prompt. */
const EVALUATIONS = 2 ** 32;

/** The displayed name of a task: its number, or which prompt of which evaluation. */
export const task = (id) => id < EVALUATIONS ? String(id)
  : `evaluation ${Math.floor(id / EVALUATIONS) - 1}, prompt ${id % EVALUATIONS}`;

/** Versions that sampled a trajectory, as 3 or 3–5. */
export const versions = (one) => one.oldest_version === null ? DASH
  : one.oldest_version === one.newest_version ? String(one.newest_version) : `${one.oldest_version}–${one.newest_version}`;

/** What a score is, in words. */
export const reward = (one) => one.score_status === null ? "not scored" : one.score_status === "ok" ? figure(one.reward) : one.score_status;
