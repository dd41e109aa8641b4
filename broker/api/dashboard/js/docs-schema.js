// JSON Schema in words: what type a value has, an example of it, and its fields as a table. Pure but for the table.

import { h } from "./dom.js";

const DEEPEST = 6;

/** References of the document followed: resolve(schema) is never a reference. */
export const resolver = (document) => function resolve(schema) {
  return schema?.$ref ? resolve(document.components.schemas[schema.$ref.split("/").at(-1)]) : schema ?? {};
};

const nameOf = (schema) => schema?.$ref?.split("/").at(-1);

/** A type in words: integer, one of "a", "b", list of ServiceStatus, text or null. */
export function typeOf(schema, resolve) {
  if (!schema) return "anything";
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.map((one) => typeOf(one, resolve)).join(" or ");
  if (nameOf(schema)) return nameOf(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(", ");
  if (schema.type === "array") return `list of ${typeOf(schema.items, resolve)}`;
  if (schema.type === "object") {
    return typeof schema.additionalProperties === "object" ? `map to ${typeOf(schema.additionalProperties, resolve)}` : "object";
  }
  return schema.type === "string" ? "text" : schema.type ?? "anything";
}

/** Bounds of a value in words, or "". */
export function boundsOf(schema) {
  const one = (schema.anyOf ?? []).find((option) => option.type !== "null") ?? schema;
  const said = [];
  if (one.minimum !== undefined) said.push(`from ${one.minimum}`);
  if (one.maximum !== undefined && one.maximum < Number.MAX_SAFE_INTEGER) said.push(`to ${one.maximum}`);
  if (schema.default !== undefined && schema.default !== null) said.push(`default ${JSON.stringify(schema.default)}`);
  return said.join(", ");
}

/** Something that fits the schema, to start from: of an object what it needs, and what is not null by default. */
export function example(schema, resolve) {
  const found = resolve(schema);
  if (found.default !== undefined) return found.default;
  const options = found.anyOf ?? found.oneOf;
  if (options) return example(options[0], resolve);
  if (found.enum) return found.enum[0];
  if (found.type === "object" && found.properties) {
    const given = ([name, one]) => found.required?.includes(name) || (one.default !== undefined && one.default !== null);
    return Object.fromEntries(Object.entries(found.properties).filter(given).map(([name, one]) => [name, example(one, resolve)]));
  }
  return { array: [], object: {}, integer: found.minimum ?? 1, number: found.minimum ?? 0, string: "", boolean: false }[found.type] ?? null;
}

/** The named schema inside of another: in a list, a map, or one of several. */
function inner(schema) {
  if (!schema) return null;
  if (schema.$ref) return schema;
  for (const one of schema.anyOf ?? schema.oneOf ?? []) if (inner(one)) return inner(one);
  return inner(schema.items) ?? (typeof schema.additionalProperties === "object" ? inner(schema.additionalProperties) : null);
}

/** The fields of an object as a table; those that are objects themselves open below. */
export function fields(schema, resolve, depth = 0) {
  const found = resolve(inner(schema) ?? schema);
  if (!found.properties) return h("p", { class: "aside" }, typeOf(schema, resolve));
  return h("ul", { class: "fields" }, Object.entries(found.properties).map(([name, one]) => {
    const line = [
      h("code", null, name), h("span", { class: "field-type" }, typeOf(one, resolve)),
      h("span", { class: "field-note" }, [one.description, boundsOf(one)].filter(Boolean).join(" ")),
    ];
    const below = inner(one);
    if (!below || !resolve(below).properties || depth >= DEEPEST) return h("li", null, h("div", { class: "field-line" }, line));
    const opened = h("details", null, h("summary", { class: "field-line" }, line));
    opened.addEventListener("toggle", () => {
      if (opened.open && opened.children.length === 1) opened.append(fields(below, resolve, depth + 1));
    });
    return h("li", null, opened);
  }));
}
