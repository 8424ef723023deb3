// Small line charts over the last minutes: one figure each, its newest value in words, its course as SVG.

import { el, say, svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 56;
const LEAST_SPAN_S = 60;

export class Chart {
  /**
   * @param title what is shown
   * @param lines column of the history -> the line's name; the first is drawn strongest
   * @param write makes a value readable
   * @param top the upper end of the scale; without it the largest value seen
   */
  constructor(title, lines, write, top) {
    this.lines = Object.entries(lines);
    this.write = write;
    this.top = top;
    this.value = el("strong", {}, "–");
    this.detail = el("span", { class: "detail" });
    this.paths = this.lines.map((_, index) => svg("path", { class: `line line${index}` }));
    this.area = svg("path", { class: "area" });
    this.peak = el("span", { class: "peak" });
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      ...[...this.paths].reverse(),
    );
    this.node = el("figure", { class: "figure" }, el("figcaption", {}, title), this.value, this.detail, picture, this.peak);
  }

  /** Draws the columns of a history; `t` holds the seconds of the epoch. */
  draw(history) {
    const last = this.lines.map(([column]) => history[column]?.at(-1) ?? null);
    say(this.value, this.write(last[0]));
    say(
      this.detail,
      this.lines.slice(1).map(([, name], index) => `${name} ${this.write(last[index + 1])}`).join(" · "),
    );
    const times = history.t ?? [];
    const values = this.lines.flatMap(([column]) => history[column] ?? []).filter((value) => value !== null);
    const most = this.top ?? Math.max(...values, 0);
    say(this.peak, values.length ? `top ${this.write(most)}` : "nothing yet");
    const end = times.at(-1) ?? 0;
    this.span = Math.max(LEAST_SPAN_S, end - (times[0] ?? end));
    this.lines.forEach(([column], index) => {
      const points = (history[column] ?? []).map((value, at) => this.point(end - times[at], value, most));
      this.paths[index].setAttribute("d", course(points));
      if (index === 0) this.area.setAttribute("d", filled(points));
    });
  }

  point(age, value, most) {
    if (value === null) return null;
    const x = WIDTH - (age / this.span) * WIDTH;
    return [x, HEIGHT - 2 - (most > 0 ? Math.min(1, value / most) : 0) * (HEIGHT - 6)];
  }
}

const at = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

/** Connects points; where there is none the line is broken. */
function course(points) {
  return points.map((point, i) => (point ? `${points[i - 1] ? "L" : "M"}${at(point)}` : "")).join("");
}

function filled(points) {
  const parts = [];
  let run = [];
  for (const point of [...points, null]) {
    if (point) run.push(point);
    else {
      if (run.length > 1) parts.push(`M${at([run[0][0], HEIGHT])}${run.map((p) => `L${at(p)}`).join("")}L${at([run.at(-1)[0], HEIGHT])}Z`);
      run = [];
    }
  }
  return parts.join("");
}
