// Where everything of the flow picture is, wide and tall. Nodes are [x, y, width, height]; an edge has a path, and the
// place of its words: [x, y of the first line, anchor].

const WIDE = {
  box: [1200, 286],
  nodes: {
    feeder: [2, 84, 172, 112],
    generator: [342, 84, 180, 112],
    reward: [690, 84, 172, 112],
    trainer: [1026, 84, 172, 112],
  },
  edges: {
    tasks: { path: "M176 140H334", words: [256, 116, "middle"] },
    trajectories: { path: "M524 140H682", words: [604, 116, "middle"] },
    scored: { path: "M864 140H1018", words: [942, 116, "middle"] },
    weights: { path: "M1112 198V240Q1112 252 1100 252H444Q432 252 432 240V204", words: [772, 272, "middle"], flat: true },
    slots: { path: "M1112 82V48Q1112 36 1100 36H100Q88 36 88 48V76", words: [600, 26, "middle"], flat: true },
  },
  gap: 24,
};

const TALL = {
  box: [350, 742],
  nodes: {
    feeder: [72, 4, 206, 104],
    generator: [72, 204, 206, 104],
    reward: [72, 404, 206, 104],
    trainer: [72, 604, 206, 104],
  },
  edges: {
    tasks: { path: "M175 110V196", words: [187, 132, "start"] },
    trajectories: { path: "M175 310V396", words: [187, 332, "start"] },
    scored: { path: "M175 510V596", words: [187, 532, "start"] },
    weights: { path: "M70 656H52Q40 656 40 644V268Q40 256 52 256H64", words: [31, 446, "vertical"], flat: true },
    slots: { path: "M280 656H306Q318 656 318 644V68Q318 56 306 56H286", words: [331, 356, "vertical"], flat: true },
  },
  gap: 0,
};

/** The layout for a width in CSS pixels. */
export const layoutFor = (width) => (width < 760 ? TALL : WIDE);
