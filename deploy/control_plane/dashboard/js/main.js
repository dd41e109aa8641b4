// Starts the parts of the page, fills the store, and keeps it up to date.

import { Refused, read, refused } from "./data/api.js";
import { archive, loadRuns } from "./data/archive.js";
import { start as startRoute } from "./data/route.js";
import { addEvents, addMetrics, addPast, addStatus, emit, on, replaceMetrics, setEvaluations, setLink, store } from "./data/store.js";
import { follow } from "./data/stream.js";
import { askForToken } from "./data/token.js";
import { byId } from "./elements/dom.js";
import { start as startEvents } from "./live/events.js";
import { start as startFlow } from "./live/flow.js";
import { start as startHeader } from "./live/header.js";
import { start as startLetters } from "./live/letters.js";
import { start as startOrders } from "./live/orders.js";
import { start as startProgress } from "./live/progress.js";
import { start as startServices } from "./live/services.js";
import { start as startUses } from "./live/uses.js";
import { start as startEvaluations } from "./views/evaluations.js";
import { start as startGrid } from "./views/grid.js";
import { start as startGroups } from "./views/groups.js";
import { start as startLogs } from "./views/logs.js";
import { start as startMachine } from "./views/machine.js";
import { choosePrompt, start as startPlayground } from "./views/playground.js";
import { showChoice, start as startRuns } from "./views/runs.js";
import { start as startSetup } from "./views/setup.js";
import { start as startTrajectories } from "./views/trajectories.js";

const SERIES = [
  "reward/mean", "staleness/mean", "train/logprob_gap_mean", "train/logprob_gap_max", "train/logprob_gap_tokens",
  "train/kl", "wall_s",
];

for (const start of [
  startHeader, startFlow, startProgress, startUses, startServices, startEvents, startTrajectories, startLetters, startOrders,
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
    refused(error);
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
    refused(error);
    setLink(error.status === 401 ? "refused" : "lost");
    if (error.status === 401) askForToken(begin);
    else setTimeout(begin, AGAIN_MS);
    return;
  }
  const live = archive.live !== null;
  document.body.classList.toggle("is-files", !live);
  startRoute(live, archive.playground);
  choosePrompt(archive.chat);
  showChoice();
  if (live) watch();
  byId("main").classList.add("is-ready");
}

begin();
