// A line of the last values, without axes: the number beside it says what it is.

import { s, setAttribute } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;

/** An <svg> with show(values); null is a gap. */
export function spark() {
  const area = s("path", { class: "spark-area" });
  const line = s("path", { class: "spark-line" });
  const svg = s("svg", {
    class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
  }, area, line);
  svg.show = (values) => {
    const known = values.filter((value) => value !== null && value !== undefined);
    if (known.length < 2) {
      setAttribute(line, "d", null);
      setAttribute(area, "d", null);
      return;
    }
    const high = Math.max(...known);
    const low = Math.min(...known, high * 0.999);
    const base = low >= 0 && low < 0.6 * high ? 0 : low;
    const span = high - base || 1;
    const x = (index) => ((index / (values.length - 1)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 2 - ((value - base) / span) * (HEIGHT - 4)).toFixed(1);
    let path = "";
    let pen = "M";
    values.forEach((value, index) => {
      if (value === null || value === undefined) pen = "M";
      else [path, pen] = [`${path}${pen}${x(index)} ${y(value)}`, "L"];
    });
    setAttribute(line, "d", path);
    setAttribute(area, "d", known.length === values.length ? `${path}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z` : null);
  };
  return svg;
}
