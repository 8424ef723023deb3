// The small part of Markdown that models write, as elements: code, headings, lists, quotes, emphasis, links.

import { el } from "./dom.js";

const ITEM = /^\s*(?:[-*+]|\d+[.)]) (.*)$/;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

/**
 * Shows text in a container. Blocks that have not changed since the last time keep their elements, so that a growing
 * answer costs no more than its last block.
 */
export function show(container, text) {
  const sources = blocks(text);
  sources.forEach((source, index) => {
    const old = container.children[index];
    if (old?.source === source) return;
    const made = block(source);
    made.source = source;
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > sources.length) container.lastChild.remove();
}

/** Splits text into blocks: fenced code, which may be unfinished, and what blank lines separate. */
function blocks(text) {
  const found = [];
  let lines = [];
  let fence = "";
  const close = () => {
    if (lines.length) found.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^\s{0,3}(```+|~~~+)/.exec(line)?.[1] ?? "";
    if (fence) {
      lines.push(line);
      if (mark.startsWith(fence)) {
        fence = "";
        close();
      }
    } else if (mark) {
      close();
      fence = mark;
      lines.push(line);
    } else if (line.trim() === "") close();
    else {
      if (/^#{1,6} /.test(line)) close();
      lines.push(line);
      if (/^#{1,6} /.test(line)) close();
    }
  }
  close();
  return found;
}

function block(source) {
  const lines = source.split("\n");
  if (/^\s{0,3}(```|~~~)/.test(lines[0])) return code(lines);
  const heading = /^(#{1,6}) (.*)$/.exec(source);
  if (heading) return el("p", { class: "heading", role: "heading", "aria-level": heading[1].length + 1 }, ...inline(heading[2]));
  if (ITEM.test(lines[0]) && lines.every((line) => ITEM.test(line) || /^\s{2,}/.test(line))) return list(lines);
  if (lines.every((line) => line.startsWith(">"))) {
    return el("blockquote", {}, ...inline(lines.map((line) => line.replace(/^> ?/, "")).join("\n")));
  }
  return el("p", {}, ...inline(source));
}

function code(lines) {
  const mark = /^\s*(```+|~~~+)/.exec(lines[0])[1];
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  return el("pre", { tabindex: 0 }, el("code", {}, lines.slice(1, closed ? -1 : undefined).join("\n")));
}

function list(lines) {
  const first = /^\s*(\d+)[.)]/.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) items.push(item[1]);
    else items.push(`${items.pop() ?? ""}\n${line.trim()}`);
  }
  return el(first ? "ol" : "ul", { start: first?.[1] }, ...items.map((item) => el("li", {}, ...inline(item))));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, verbatim, strong, emphasis, label, href] = match;
    nodes.push(text.slice(end, match.index));
    end = match.index + whole.length;
    if (verbatim) nodes.push(el("code", {}, verbatim));
    else if (strong) nodes.push(el("strong", {}, strong));
    else if (emphasis) nodes.push(el("em", {}, emphasis));
    else nodes.push(el("a", { href, target: "_blank", rel: "noopener noreferrer" }, label));
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}
