// What a run was started with: settings, of several runs beside each other, versions, machine, git commit, checkpoints.

import { download, read, refused, token } from "../data/api.js";
import { chosen, of } from "../data/archive.js";
import { byId, h, setText } from "../elements/dom.js";
import { bytes, plural } from "../elements/format.js";
import { save } from "../elements/grid-chart.js";
import { register } from "../data/route.js";

let found = [];
let opened = 0;

const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value, (_, part) => part ?? undefined));
const when = (time) => new Date(time * 1000).toLocaleString("en-GB");

function settings() {
  const names = [...new Set(found.flatMap(({ config }) => Object.keys(config.settings)))].sort();
  const text = byId("setup-search").value.toLowerCase();
  const which = byId("setup-which").value;
  const rows = names.filter((name) => {
    const values = found.map(({ config }) => shown(config.settings[name]));
    if (which === "changed" && !found.some(({ config }) => config.changed.includes(name))) return false;
    if (which === "different" && new Set(values).size < 2) return false;
    return !text || name.includes(text) || values.some((value) => value.toLowerCase().includes(text));
  });
  setText(byId("setup-note"), plural(rows.length, "setting"));
  byId("setup-settings").replaceChildren(h("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table of settings" },
    h("table", { class: "table settings" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), found.map(({ run }) => h("th", { scope: "col" }, run)))),
      h("tbody", null, rows.map((name) => {
        const values = found.map(({ config }) => shown(config.settings[name]));
        return h("tr", { "data-different": new Set(values).size > 1 ? "" : null }, h("th", { scope: "row" }, h("code", null, name.split(/(?<=\.)/).flatMap((part) => [h("wbr"), part]).slice(1))),
          values.map((value) => h("td", null, h("code", null, value))));
      })))));
}

/** A link that saves a checkpoint as a tar archive. A link has no token: with one the page fetches the file itself. */
function archiveLink(run, one) {
  const path = of(run, `checkpoints/${one.name}`);
  const link = h("a", { href: path, download: `${one.name}.tar`, "aria-label": `Download ${one.name}` }, "Download");
  link.addEventListener("click", async (event) => {
    if (token.get() === null) return;
    event.preventDefault();
    setText(link, "Loading …");
    try {
      save(await download(path), `${one.name}.tar`);
      setText(link, "Download");
    } catch (error) {
      setText(link, refused(error).message);
    }
  });
  return link;
}

function facts({ run, config, checkpoints }) {
  const { environment: env } = config;
  const git = env.git ? `${env.git.commit.slice(0, 12)}${env.git.branch ? ` on ${env.git.branch}` : ""}${env.git.changed ? ", with changes" : ""}` : "none";
  const pairs = env.python ? [
    ["Started", env.time ? when(env.time) : "–"], ["Host", env.host], ["Platform", env.platform],
    ["Processors", `${env.cpus ?? "–"}, ${bytes(env.memory_bytes)} of memory`], ["GPUs", env.gpus?.length ? env.gpus.join(", ") : "none"],
    ["Trainer's ranks", env.ranks], ["Git commit", git], ["Python", env.python],
    ...Object.entries(env.packages ?? {}), ["Earlier trainers", env.before?.length ?? 0],
  ] : [];
  return h("section", { class: "panel", "aria-label": `Environment of ${run}` },
    h("div", { class: "panel-head" }, h("h2", null, `Environment${found.length > 1 ? ` of ${run}` : ""}`)),
    pairs.length ? h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, shown(value)))))
      : h("p", { class: "empty" }, "No trainer has written it yet."),
    h("h3", { class: "apart" }, "Checkpoints"),
    checkpoints.length ? h("ul", { class: "plain-list" }, [...checkpoints].reverse().map((one) => h("li", null, h("code", null, one.name), ` step ${one.step} · ${bytes(one.bytes)} · ${when(one.time)} · `, archiveLink(run, one))))
      : h("p", { class: "empty" }, "None is in the run's folder."));
}

async function show() {
  const runs = chosen();
  const mine = ++opened;
  let answers;
  try {
    answers = await Promise.all(runs.map(async (run) => ({
      run, config: await read(of(run, "config")), checkpoints: (await read(of(run, "checkpoints"))).checkpoints,
    })));
  } catch (error) {
    refused(error);
    if (mine === opened) setText(byId("setup-note"), error.message);
    return;
  }
  // Other runs were chosen meanwhile: their answers may be there already.
  if (mine !== opened) return;
  found = answers;
  byId("setup-which").querySelector("[value=different]").disabled = runs.length < 2;
  if (runs.length < 2 && byId("setup-which").value === "different") byId("setup-which").value = "changed";
  if (runs.length > 1 && byId("setup-which").value === "changed") byId("setup-which").value = "different";
  settings();
  byId("setup-facts").replaceChildren(...found.map(facts));
}

export function start() {
  register("setup", show);
  byId("setup-search").addEventListener("input", settings);
  byId("setup-which").addEventListener("change", settings);
}
