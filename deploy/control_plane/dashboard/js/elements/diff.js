// The difference of two texts by words; pure functions.

const MOST = 3_000_000;

/** Words, and what stands between them. */
const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/** [kind, text] parts that make `now` of `before`: same, added, or removed. */
export function difference(before, now) {
  const [old, fresh] = [words(before), words(now)];
  let start = 0;
  while (start < old.length && start < fresh.length && old[start] === fresh[start]) start++;
  let end = 0;
  while (end < old.length - start && end < fresh.length - start && old.at(-1 - end) === fresh.at(-1 - end)) end++;
  const middle = between(old.slice(start, old.length - end), fresh.slice(start, fresh.length - end));
  return merge([["same", fresh.slice(0, start).join("")], ...middle, ["same", fresh.slice(fresh.length - end).join("")]]);
}

/** By the longest common subsequence; two texts that are too long for that differ as a whole. */
function between(old, fresh) {
  if ((old.length + 1) * (fresh.length + 1) > MOST) return [["removed", old.join("")], ["added", fresh.join("")]];
  const width = fresh.length + 1;
  const longest = new Uint32Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i--)
    for (let j = fresh.length - 1; j >= 0; j--)
      longest[i * width + j] = old[i] === fresh[j] ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  const parts = [];
  let [i, j] = [0, 0];
  while (i < old.length || j < fresh.length) {
    if (i < old.length && j < fresh.length && old[i] === fresh[j]) {
      parts.push(["same", old[i]]);
      [i, j] = [i + 1, j + 1];
    } else if (j >= fresh.length || (i < old.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) parts.push(["removed", old[i++]]);
    else parts.push(["added", fresh[j++]]);
  }
  return parts;
}

function merge(parts) {
  const merged = [];
  for (const [kind, text] of parts) {
    if (!text) continue;
    if (merged.at(-1)?.[0] === kind) merged.at(-1)[1] += text;
    else merged.push([kind, text]);
  }
  return merged;
}
