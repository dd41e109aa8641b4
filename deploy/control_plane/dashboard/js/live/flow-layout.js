// Where everything of the flow picture is, in a row or, on a phone, in a column. Nodes are [x, y, width, height]; an
// edge has a path, and the place of its words: [x, y of the first line, anchor].

const TOP = 84;
const HEIGHT = 112;
const ROLES = ["feeder", "generator", "reward", "trainer"];
const STREAMS = ["tasks", "trajectories", "scored"];

/** Four boxes in a row: weights go back below them, slots above. split: what waits and what is taken on two lines. */
function row(total, width, split) {
  const gap = (total - 4 - 4 * width) / 3;
  const left = ROLES.map((_, index) => 2 + index * (width + gap));
  const [feeder, generator, , trainer] = left.map((x) => x + width / 2);
  const middle = TOP + HEIGHT / 2;
  const bottom = TOP + HEIGHT;
  const run = (index) => `M${left[index] + width + 2} ${middle}H${left[index + 1] - 8}`;
  const edges = Object.fromEntries(STREAMS.map((name, index) =>
    [name, { path: run(index), words: [left[index] + width + gap / 2 - 2, 116, "middle"] }]));
  return {
    box: [total, 286],
    nodes: Object.fromEntries(ROLES.map((role, index) => [role, [left[index], TOP, width, HEIGHT]])),
    edges: {
      ...edges,
      weights: {
        path: `M${trainer} ${bottom + 2}V240Q${trainer} 252 ${trainer - 12} 252H${generator + 12}Q${generator} 252 ${generator} 240V${bottom + 8}`,
        words: [(generator + trainer) / 2, 272, "middle"], flat: true,
      },
      slots: {
        path: `M${trainer} ${TOP - 2}V48Q${trainer} 36 ${trainer - 12} 36H${feeder + 12}Q${feeder} 36 ${feeder} 48V${TOP - 8}`,
        words: [total / 2, 26, "middle"], flat: true,
      },
    },
    gap,
    split,
  };
}

const WIDE = row(1200, 176, false);
const NARROW = row(940, 152, true);

/** Four boxes in a column, the words beside the arrows; weights go back on the left, slots on the right. */
const COLUMN = {
  box: [350, 742],
  nodes: Object.fromEntries(ROLES.map((role, index) => [role, [72, 4 + 200 * index, 206, 104]])),
  edges: {
    ...Object.fromEntries(STREAMS.map((name, index) =>
      [name, { path: `M175 ${110 + 200 * index}V${196 + 200 * index}`, words: [187, 132 + 200 * index, "start"] }])),
    weights: { path: "M70 656H52Q40 656 40 644V268Q40 256 52 256H64", words: [31, 446, "vertical"], flat: true },
    slots: { path: "M280 656H306Q318 656 318 644V68Q318 56 306 56H286", words: [331, 356, "vertical"], flat: true },
  },
  gap: 0,
  split: false,
};

/** The layout for a width in CSS pixels: letters never get much smaller than they were meant. */
export const layoutFor = (width) => (width < 760 ? COLUMN : width < 1080 ? NARROW : WIDE);
