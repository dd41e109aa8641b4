// Pictures that the policy was shown, small, and large when clicked. They are asked for with this tab's token, so that an
// address alone shows none.

import { download, refused } from "../data/api.js";
import { h } from "./dom.js";

/** A file as a data: URL, which the page's own policy lets an image have. */
const dataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

function picture(digest, index, base) {
  const image = h("img", { alt: `Image ${index + 1}` });
  const item = h("li", { "data-digest": digest });
  item.append(h("button", {
    type: "button", "aria-label": `Image ${index + 1}, larger or smaller`, onclick: () => item.classList.toggle("is-large"),
  }, image));
  download(`${base}/${digest}`).then(dataUrl).then((url) => { image.src = url; }, (error) => {
    item.replaceChildren(h("span", { class: "aside" }, refused(error).message));
  });
  return item;
}

/** Images by their digests; null without any. base: where they are asked for. */
export const pictures = (digests, base = "v1/images") => (digests.length
  ? h("ul", { class: "pictures", "aria-label": "Images" }, digests.map((digest, index) => picture(digest, index, base)))
  : null);
