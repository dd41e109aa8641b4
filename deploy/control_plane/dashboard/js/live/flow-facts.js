// What the flow picture says, from one status: a pure function, apart from drawing.

import { count, duration, figure, percent, plural, rate, short } from "../elements/format.js";

/** Which part of the picture limits the run, by the bottleneck's name for it. */
const PLACE = {
  prompts: "feeder", generation: "generator", reward: "reward", training: "trainer", weights: "weights",
  staleness: "slots",
};

const moving = (status) => !["paused", "stopped", "finished", "failed", "unreachable"].includes(status.state);

function queue(status, name) {
  const stream = status.streams.find((stream) => stream.name === name);
  if (!stream) return null;
  const lag = stream.oldest_s === null ? "nothing waits" : `oldest ${duration(stream.oldest_s)}`;
  return {
    name,
    rate: stream.rate,
    lines: [`${rate(stream.rate)}/s`, `${count(stream.waiting)} wait`, `${count(stream.pending)} taken`, lag],
  };
}

/** {nodes: {role: {...}}, edges: {name: {...}}, mark, moving, words}; words is the picture for those who can't see it. */
export function facts(status) {
  const live = (role) => status.services.filter((service) => service.role === role && service.live);
  const { throughput, staleness, ledger, bottleneck } = status;
  const loads = live("generator").map((service) => service.load).filter((load) => load !== null);
  const load = loads.length ? loads.reduce((sum, load) => sum + load, 0) / loads.length : null;
  const evaluating = live("generator").filter((service) => service.figures.evaluating).length;
  const loading = live("generator").filter((service) => ["loading", "starting"].includes(service.state)).length;
  const wait = bottleneck.figures.trainer_wait_share;
  const nodes = {
    feeder: {
      title: "Feeder", figure: rate(throughput.admitted_groups), unit: "groups/s",
      note: live("feeder")[0]?.state === "full" ? "all slots in use" : live("feeder")[0]?.state ?? "",
    },
    generator: {
      title: "Generators", figure: short(throughput.generated_tokens), unit: "tok/s", load,
      // The bar says how full they are when there is something else to say.
      note: loading && loading === live("generator").length ? `${count(loading)} loading` : [
        `${count(live("generator").length)} live`, evaluating ? `${count(evaluating)} evaluating`
          : load === null ? "" : `${percent(load)} full`].filter(Boolean).join(" · "),
    },
    reward: {
      title: "Reward", figure: rate(throughput.scored_samples), unit: "samples/s",
      note: `${count(live("reward").length)} live`,
    },
    trainer: {
      title: "Trainer", figure: short(throughput.trained_tokens), unit: "tok/s",
      load: wait === undefined || !moving(status) ? null : 1 - wait,
      note: wait === undefined || !moving(status) ? `step ${count(status.step)}` : `waits ${percent(wait)} of its time`,
    },
  };
  for (const [role, node] of Object.entries(nodes)) {
    if (live(role).length) continue;
    // In its first seconds a run misses no service yet.
    const begun = status.leader_term > 0;
    node.missing = moving(status) && begun;
    node.awaited = moving(status) && !begun;
    Object.assign(node, { note: node.missing ? "none is alive" : node.awaited ? "not here yet" : "ended", load: null });
  }
  const age = staleness.mean === null ? "" :
    ` · staleness ${figure(staleness.mean, 1)} mean, ${staleness.max} max of ${staleness.bound}`;
  const edges = {
    tasks: queue(status, "tasks"),
    trajectories: queue(status, "trajectories"),
    scored: queue(status, "scored"),
    weights: {
      name: "weights", rate: throughput.steps_per_minute,
      lines: [`version ${count(status.version)}`, `${rate(throughput.steps_per_minute)} per minute${age}`],
    },
    slots: {
      name: "slots", rate: throughput.admitted_groups,
      lines: [`${count(ledger.active)} of ${count(ledger.capacity)} in use`],
    },
  };
  const mark = PLACE[bottleneck.limit] ?? null;
  const words = `${Object.values(nodes).map((node) => `${node.title}: ${node.figure} ${node.unit}, ${node.note}.`).join(" ")} ` +
    `${Object.values(edges).filter(Boolean).map((edge) => `${edge.name}: ${edge.lines.join(", ")}.`).join(" ")} ` +
    `${mark ? `Bottleneck: ${nodes[mark]?.title ?? mark}.` : ""} ${plural(status.dead_letters, "dead letter")}.`;
  return { nodes, edges, mark, moving: moving(status), words };
}
