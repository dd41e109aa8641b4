// Starts the parts of the page, fills the store, and keeps it up to date.

import { Refused, read } from "./api.js";
import { archive, loadRuns } from "./archive.js";
import { byId } from "./dom.js";
import { start as startEvaluations } from "./evaluations.js";
import { start as startEvents } from "./events.js";
import { start as startFlow } from "./flow.js";
import { start as startGrid } from "./grid.js";
import { start as startGroups } from "./groups.js";
import { start as startHeader } from "./header.js";
import { start as startLetters } from "./letters.js";
import { start as startLogs } from "./logs.js";
import { start as startMachine } from "./machine.js";
import { start as startOrders } from "./orders.js";
import { start as startPlayground } from "./playground.js";
import { start as startProgress } from "./progress.js";
import { start as startRoute } from "./route.js";
import { showChoice, start as startRuns } from "./runs.js";
import { start as startServices } from "./services.js";
import { start as startSetup } from "./setup.js";
import { addEvents, addMetrics, addPast, addStatus, emit, on, replaceMetrics, setEvaluations, setLink, store } from "./store.js";
import { follow } from "./stream.js";
import { askForToken } from "./token.js";
import { start as startTrajectories } from "./trajectories.js";

const SERIES = [
  "reward/mean", "staleness/mean", "train/logprob_gap_mean", "train/logprob_gap_max", "train/logprob_gap_tokens",
  "train/kl", "wall_s",
];

for (const start of [
  startHeader, startFlow, startProgress, startServices, startEvents, startTrajectories, startLetters, startOrders,
  startGrid, startGroups, startEvaluations, startPlayground, startMachine, startLogs, startSetup, startRuns,
]) start();

const history = `v1/metrics-history?limit=10000&order=newest&${SERIES.map((name) => `name=${encodeURIComponent(name)}`).join("&")}`;

/** What the stream does not tell: everything before it. Called at each connection. */
async function fill() {
  const got = await Promise.allSettled([read(history), read("v1/evaluations"), read("v1/timeline?limit=200&order=newest"),
    read("v1/throughput-history")]);
  const [metrics, evaluations, timeline, past] = got.map((one) => one.value);
  if (metrics) replaceMetrics(metrics);
  if (evaluations) setEvaluations(evaluations.evaluations);
  if (past) addPast(past);
  if (timeline) addEvents(timeline.events.reverse());
  emit("connected");
  for (const one of got) if (one.reason && !(one.reason instanceof Refused)) throw one.reason;
}

let evaluated = -1;
async function followEvaluations() {
  const version = store.status.evaluation?.version ?? -1;
  if (version === evaluated) return;
  evaluated = version;
  try {
    setEvaluations((await read("v1/evaluations")).evaluations);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    evaluated = -1; // Asked again with the next status.
  }
}
on("status", followEvaluations);

const only = (metrics) => ({
  ...metrics, series: Object.fromEntries(SERIES.map((name) => [name, metrics.series[name]]).filter(([, values]) => values)),
});

/** Follow the run that this server watches. */
function watch() {
  const stream = follow("v1/events", {
    onEvent(name, data) {
      if (name === "status") addStatus(data);
      else if (name === "metrics") addMetrics(only(data));
      else if (name === "event") addEvents([data]);
    },
    onLink(state) {
      setLink(state);
      if (state === "live") fill();
      if (state === "refused") askForToken(() => stream.retry());
    },
  });
}

const AGAIN_MS = 2000;

/** Ask which runs there are, and whether this server watches one; again until it answers. */
async function begin() {
  try {
    await loadRuns();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    setLink(error.status === 401 ? "refused" : "lost");
    if (error.status === 401) askForToken(begin);
    else setTimeout(begin, AGAIN_MS);
    return;
  }
  const live = archive.live !== null;
  document.body.classList.toggle("is-files", !live);
  startRoute(live, archive.playground);
  showChoice();
  if (live) watch();
  byId("main").classList.add("is-ready");
}

begin();
