// Which shade each token has, and what the shades mean. The style sheet has the colours; pure functions.

import { plural } from "./format.js";

/** Probabilities from which a shade begins, and its name in the legend. */
const LIKELY = [[0.9, "over 90 %"], [0.5, "50–90 %"], [0.1, "10–50 %"], [0.01, "1–10 %"], [0, "under 1 %"]];
const SHADES = 6;

/** Versions of a trajectory, oldest first. */
const known = (table) => [...new Set(table.version.filter((version) => version !== null))].sort((a, b) => a - b);

/** With more versions than shades the oldest ones share the first. */
const place = (versions, version) => Math.max(0, versions.indexOf(version) - Math.max(0, versions.length - SHADES));

/** Names of the shades of all tokens. */
export function shades(mode, table) {
  const versions = known(table);
  return table.mask.map((own, index) => {
    if (own !== 1) return "none";
    if (mode === "mask") return "own";
    if (mode === "version") return `version-${place(versions, table.version[index])}`;
    const probability = Math.exp(table.logprob[index]);
    return `likely-${LIKELY.findIndex(([from]) => probability >= from)}`;
  });
}

/** [shade, words] for each shade that occurs. */
export function legend(mode, table) {
  const own = table.mask.filter((one) => one === 1).length;
  const others = table.mask.length - own;
  const rest = others ? [["none", `${plural(others, "token")} not trained on`]] : [];
  if (mode === "mask") return [["own", `${plural(own, "token")} trained on`], ...rest];
  if (mode === "logprob") return [...LIKELY.map(([, text], index) => [`likely-${index}`, text]), ...rest];
  const versions = known(table);
  const oldest = versions.length - SHADES;
  return [
    ...versions.slice(Math.max(0, oldest)).map((version, index) =>
      [`version-${index}`, `version ${oldest > 0 && index === 0 ? `${versions[0]}–` : ""}${version}`]),
    ...rest,
  ];
}
