// The card of one instance: its state in a word, what is left of its lease, and for an engine what it holds.

import { duration, el, say, short } from "./dom.js";

const WORDS = { serving: "serving", draining: "draining", late: "no heartbeat", dead: "dead", left: "signed off" };
const MAX_SQUARES = 64;

export class Card {
  constructor(role) {
    this.role = role;
    this.name = el("h3", {});
    this.state = el("span", { class: "state" });
    this.lease = bar("lease");
    this.leaseText = el("span", { class: "small" });
    this.load = el("p", { class: "small" });
    this.parts = [el("header", {}, this.name, this.state), this.lease.node, this.leaseText, this.load];
    if (role === "scheduler") this.addEngine();
    this.node = el("article", { class: "card" }, ...this.parts);
  }

  addEngine() {
    this.squares = el("div", { class: "squares", "aria-hidden": "true" });
    this.held = el("p", { class: "small" });
    this.pages = bar("pages");
    this.cached = this.pages.add("cached");
    this.pagesText = el("p", { class: "small" });
    this.parts.push(this.squares, this.held, this.pages.node, this.pagesText);
  }

  /** Draws what the instance says of itself; `hop` is its stream of unfinished requests, if it is an engine. */
  draw(instance, hop) {
    say(this.name, instance.name);
    say(this.state, WORDS[instance.state]);
    this.node.dataset.state = instance.state;
    this.node.title = `${instance.id}, release ${instance.version}`;
    const gone = instance.gone_s !== null;
    this.lease.set(gone ? 0 : Math.max(0, 1 - instance.still_s / instance.lease_s));
    say(this.leaseText, gone ? `${duration(instance.gone_s)} ago` : lease(instance));
    say(this.load, this.role === "api" ? `${short(instance.running)} open` : this.role === "tokenizer" ? inHand(instance) : "");
    this.load.hidden = !this.load.textContent;
    if (this.role === "scheduler") this.drawEngine(instance, hop, gone);
  }

  drawEngine(instance, hop, gone) {
    const count = hop ? hop.length : instance.running + instance.waiting;
    this.drawSquares(count, gone ? 0 : instance.running);
    say(this.held, gone ? left(count) : load(instance, hop));
    this.pages.node.hidden = this.pagesText.hidden = gone;
    if (gone) return;
    const { pages, pages_live: live, pages_cached: cached } = instance;
    this.pages.set(pages ? live / pages : 0);
    this.cached.set(pages ? cached / pages : 0);
    say(this.pagesText, `KV pages: ${short(live)} in use, ${short(cached)} cached, of ${short(pages)}`);
  }

  /** One square per request it holds, so that requests are seen to move from one engine to another. */
  drawSquares(count, running) {
    const wanted = Math.min(count, MAX_SQUARES);
    while (this.squares.children.length > wanted) this.squares.lastChild.remove();
    while (this.squares.children.length < wanted) this.squares.append(el("i"));
    [...this.squares.children].forEach((square, index) => square.classList.toggle("running", index < running));
  }
}

const lease = ({ state, still_s, lease_s }) =>
  state === "late" ? `dead in ${duration(Math.max(0, lease_s - still_s))}` : `lease ${duration(lease_s)}`;

const inHand = ({ running, waiting }) =>
  waiting || running ? `${short(running)} being encoded, ${short(waiting)} held for an engine` : "nothing in hand";

const left = (count) => (count ? `${short(count)} of its requests are still to move` : "all of its requests have moved");

function load({ running, slots, waiting, tokens_per_s, taken }, hop) {
  const parts = [`${short(running)} of ${short(slots)} slots`, `${short(waiting)} waiting`, `${short(tokens_per_s)} tokens/s`];
  if (hop?.length) parts.push(`oldest ${duration(hop.oldest_s)}`);
  if (taken) parts.push(`${short(taken)} taken over`);
  return parts.join(" · ");
}

/** A horizontal bar, told in words beside it. */
function bar(kind) {
  const node = el("div", { class: `meter ${kind}`, "aria-hidden": "true" });
  const add = (name) => {
    const part = el("span", { class: name });
    node.append(part);
    return { set: (share) => (part.style.width = `${(100 * Math.min(1, share)).toFixed(1)}%`) };
  };
  const first = add("used");
  return { node, add, set: first.set };
}
