// Elements from plain calls, and lists that keep their elements. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value === false) continue;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: h("button", {class: "x", onclick: f}, "text", child). */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Set text only when it differs: unchanged text keeps a selection and costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute only when it differs; null removes it. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/**
 * Make the children of `parent` match `items`, one element each, kept by key: focus, hover and scroll survive.
 * create(item) gives an element, update(element, item) brings it up to date.
 */
export function keyed(parent, items, key, create, update) {
  const known = new Map([...parent.children].map((element) => [element.dataset.key, element]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = known.get(name);
    if (element) known.delete(name);
    else {
      element = create(item);
      element.dataset.key = name;
    }
    update(element, item);
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
  }
  for (const element of known.values()) element.remove();
}
