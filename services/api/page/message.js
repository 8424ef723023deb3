// One message as it is shown: its text as Markdown or as coloured tokens, and the figures of an answer beneath it.

import { duration, el, say } from "./dom.js";
import { show } from "./markdown.js";

const WORDS = { stop: "", length: "cut at the token limit", stopped: "stopped", tool_calls: "calls a tool" };
/** Lower bounds of the five shades of probability. */
const SHADES = [0.2, 0.5, 0.8, 0.95];

export class Message {
  /** `message` is the conversation's own object; `again` is called when another answer is wanted. */
  constructor(message, again) {
    this.message = message;
    this.isAnswer = message.role === "assistant";
    this.thought = el("div", { class: "text" });
    this.thinking = el("details", { class: "thinking" }, el("summary", {}, "Thinking"), this.thought);
    this.text = el("div", { class: "text plain" });
    this.tokens = el("div", { class: "text tokens" });
    this.figures = el("span", { class: "figures-line" });
    this.again = el("button", { type: "button", class: "quiet regenerate" }, "Regenerate");
    this.again.addEventListener("click", again);
    this.copy = el("button", { type: "button", class: "quiet" }, "Copy");
    this.copy.addEventListener("click", () => this.copyText());
    this.wait = el("p", { class: "wait" }, "waiting");
    this.wait.hidden = true;
    this.error = el("p", { class: "error", role: "alert" });
    this.foot = el("footer", {}, this.figures, this.copy, this.again);
    const parts = this.isAnswer ? [this.thinking, this.text, this.tokens, this.wait, this.error, this.foot] : [this.text];
    this.node = el(
      "article",
      { class: `message ${message.role}`, "aria-label": this.isAnswer ? "Answer" : "You" },
      el("h2", {}, this.isAnswer ? message.model || "Answer" : "You"),
      ...parts,
    );
    this.drawnTokens = 0;
    this.decoder = new TextDecoder();
    this.due = false;
    this.draw();
  }

  /** Draws with the next frame, however often it is asked for. */
  later(after) {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.draw();
      after();
    });
  }

  draw() {
    const { message } = this;
    if (!this.isAnswer) {
      say(this.text, message.content);
      return;
    }
    this.thinking.hidden = !message.reasoning;
    if (message.reasoning) show(this.thought, message.reasoning);
    show(this.text, message.content);
    this.drawTokens();
    this.node.classList.toggle("has-tokens", message.tokens.length > 0);
    this.node.setAttribute("aria-busy", String(!message.ended));
    say(this.figures, figures(message));
    say(this.error, message.trouble ?? "");
    this.error.hidden = !message.trouble;
    this.foot.hidden = !message.ended && !message.firstAt;
  }

  /** Adds the tokens that have come; those that make a character together are decoded together. */
  drawTokens() {
    const { tokens } = this.message;
    for (; this.drawnTokens < tokens.length; this.drawnTokens++) {
      const { bytes, token, logprob } = tokens[this.drawnTokens];
      const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      const probability = Math.exp(logprob);
      const shade = SHADES.filter((bound) => probability >= bound).length;
      this.tokens.append(el("span", { class: `p${shade}`, title: `${(100 * probability).toFixed(1)} %` }, text));
    }
    // What ends an answer (an end token, a stop string) is drawn by the model, and is no part of the text.
    const { ended, content } = this.message;
    while (ended && this.tokens.textContent.length > content.length) this.tokens.lastChild.remove();
  }

  /** Shows that nothing has come for a moment: the request is queued, or the connection was lost. */
  waiting(is) {
    this.wait.hidden = !is || this.message.ended === true;
  }

  offerAgain(is) {
    this.again.hidden = !is;
    this.copy.hidden = !this.message.ended || !navigator.clipboard; // there is none on plain HTTP from elsewhere
  }

  async copyText() {
    await navigator.clipboard.writeText(this.message.content);
    say(this.copy, "Copied");
    setTimeout(() => say(this.copy, "Copy"), 1500);
  }
}

/** Says what an answer cost: tokens in and out, tokens per second, time to the first one, how it ended. */
function figures(message) {
  const { usage, startedAt, firstAt, lastAt, finish } = message;
  const parts = [];
  if (usage) {
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    const seconds = (lastAt - firstAt) / 1000;
    if (seconds > 0 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (firstAt) parts.push(`first after ${duration((firstAt - startedAt) / 1000)}`);
  if (message.ended && WORDS[finish]) parts.push(WORDS[finish]);
  return parts.join(" · ");
}
