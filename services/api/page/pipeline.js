// The picture of the pipeline: services in the order of the stream, the queues between them, figures, events.

import { Chart } from "./chart.js";
import { byId, duration, el, say, short } from "./dom.js";
import { Card } from "./instance.js";

const SPAN_S = 300;
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);

const CHARTS = () => [
  new Chart("Tokens per second", { tokens_per_s: "now" }, short),
  new Chart("Requests running", { running: "running", waiting: "waiting" }, short),
  new Chart("Time to the first token, median", { ttft_p50: "p50", ttft_p95: "p95", ttft_p99: "p99" }, duration),
  new Chart("Between tokens, median", { gap_p50: "p50", gap_p95: "p95", gap_p99: "p99" }, duration),
  new Chart("KV pages in use", { kv_used: "now" }, percent, 1),
  new Chart("Prefix cache hits", { hit_rate: "now" }, percent, 1),
];

/** The columns, and the streams that lead into them; what leads into the api are its clients. */
const STAGES = [
  { role: "api", title: "api", queue: "answers being given" },
  { role: "tokenizer", title: "tokenizer", stream: "tokenize", queue: "requests to encode" },
  { role: "scheduler", title: "scheduler and engine", stream: "generate", queue: "unfinished requests" },
  { role: "detokenizer", title: "detokenizer", stream: "tokens", queue: "steps to put into words" },
];

const EVENTS = {
  joined: () => "joined",
  died: (count) => `died${count ? `, holding ${requests(count)}` : ""}`,
  left: () => "signed off",
  draining: (count) => `is draining${count ? `, with ${requests(count)} to end or hand over` : ""}`,
  woke: () => "is back",
  took: (count) => `took over ${requests(count)}`,
};
const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const key = ({ role, id }) => `${role} ${id}`;
const requests = (count) => (count === 1 ? "1 request" : `${count} requests`);

export class Pipeline {
  constructor() {
    this.since = 0;
    this.history = {};
    this.cards = new Map();
    this.known = new Set();
    this.charts = CHARTS();
    byId("figures").append(...this.charts.map((chart) => chart.node));
    this.stages = STAGES.map((stage) => new Stage(stage));
    byId("flow").append(...this.stages.map((stage) => stage.node));
  }

  /** Takes in what `/v1/pipeline` has answered. */
  take(picture) {
    this.remember(picture.history);
    for (const chart of this.charts) chart.draw(this.history);
    const held = new Map(picture.hops.filter((hop) => hop.stream === "generate").map((hop) => [hop.of, hop]));
    this.drawCards(picture.instances, held);
    for (const stage of this.stages) stage.drawQueue(picture);
    this.drawEvents(picture.events);
    this.drawNotice(picture);
  }

  /** Adds new seconds to the history; replicas that count the same second are heard once. */
  remember(history) {
    const fresh = (history.t ?? []).findIndex((t) => t > this.since);
    if (fresh < 0) return;
    for (const [column, values] of Object.entries(history)) {
      this.history[column] = [...(this.history[column] ?? []), ...values.slice(fresh)].slice(-SPAN_S);
    }
    this.since = this.history.t.at(-1);
  }

  drawCards(instances, held) {
    const present = new Set(instances.map(key));
    for (const [name, card] of this.cards) {
      if (present.has(name)) continue;
      card.node.remove();
      this.cards.delete(name);
    }
    for (const instance of instances) {
      let card = this.cards.get(key(instance));
      if (!card) {
        card = new Card(instance.role);
        this.cards.set(key(instance), card);
        this.stages.find((stage) => stage.role === instance.role).list.append(card.node);
      }
      card.draw(instance, held.get(instance.id));
    }
  }

  drawEvents(events) {
    for (const { id, at, kind, name, count } of events) {
      if (this.known.has(id)) continue;
      this.known.add(id);
      const time = new Date(at * 1000);
      byId("events").prepend(
        el(
          "li",
          { class: kind },
          el("time", { datetime: time.toISOString() }, time.toLocaleTimeString([], { hour12: false })),
          ` ${name} ${EVENTS[kind]?.(count) ?? kind}`,
        ),
      );
    }
    while (byId("events").children.length > 64) byId("events").lastChild.remove();
  }

  drawNotice({ connected, missing }) {
    const notice = byId("notice");
    notice.hidden = connected && !missing.length;
    if (!connected) say(notice, "The broker is away: what is shown was seen last. Requests wait, and go on by themselves.");
    else if (missing.length) say(notice, `Missing: ${missing.join(", ")}. Running requests wait, and go on when it is back.`);
  }
}

/** A column: one role, its instances, and the queue in front of it. */
class Stage {
  constructor({ role, title, stream, queue }) {
    this.role = role;
    this.stream = stream;
    this.depth = el("strong", {}, "0");
    this.age = el("span", {}, "");
    this.queue = el("p", { class: "queue" }, this.depth, ` ${queue}`, this.age);
    this.list = el("div", { class: "cards" });
    this.node = el("section", { class: `stage ${role}`, "aria-label": title }, el("h2", {}, title), this.queue, this.list);
  }

  drawQueue({ hops, instances }) {
    const mine = hops.filter((hop) => hop.stream === this.stream);
    const open = instances.filter((instance) => instance.role === this.role && instance.gone_s === null);
    const length = total(this.stream ? mine.map((hop) => hop.length) : open.map((instance) => instance.running));
    const oldest = Math.max(0, ...mine.map((hop) => hop.oldest_s));
    say(this.depth, short(length));
    say(this.age, length && oldest >= 0.05 ? `, oldest ${duration(oldest)}` : "");
    this.queue.classList.toggle("empty", length === 0);
  }
}
