// Making elements. Text is only ever set as text: nothing that a model or a server says becomes markup.

/** Makes an element: attributes (a `class`, `title`, ...; false leaves one out), then children, strings among them. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Puts text into a node, unless it is there: what does not change is not read out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const byId = (id) => document.getElementById(id);

/** Writes a number shortly: three digits, thousands in between. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10) return Math.round(value).toLocaleString("en");
  return value.toLocaleString("en", { maximumFractionDigits: value >= 1 ? 1 : 2 });
}

/** Writes seconds: 3.2 ms, 480 ms, 1.2 s, 4 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return `${Math.round(seconds / 60)} min`;
}
