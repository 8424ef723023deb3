// The chat: a conversation, one running answer, and its resumption after a reload or a lost connection.
//
// The conversation lives in this tab's storage alone. An answer is asked for as resumable, and what is kept of it
// (its text, its id, the id of the last event) is kept together, so that exactly the rest is asked for later.

import { ApiError, call, events } from "./api.js";
import { byId, say } from "./dom.js";
import { Message } from "./message.js";

const TALK = "millrace.talk";
const SETTINGS = "millrace.settings";
const SAVE_EVERY_MS = 250;
const MAX_RETRIES = 6;
const AWAY = [0, 503];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT_FIELDS = [...NUMBERS, "system", "model"];

/** What is remembered of a message. `stream` is the running answer: its id, and that of its last event. */
const newAnswer = (model) => ({ role: "assistant", content: "", reasoning: "", tokens: [], model, startedAt: Date.now() });

export class Chat {
  constructor() {
    this.talk = read(sessionStorage, TALK, []);
    this.shown = [];
    this.running = null;
    this.savedAt = 0;
    this.list = byId("messages");
    this.bind();
    this.restoreSettings();
    for (const message of this.talk) this.add(message);
    this.draw();
    this.resumeAfterReload();
  }

  // --- the form -----------------------------------------------------------------------------------------------

  bind() {
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(prompt.value);
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(prompt.value);
      }
    });
    prompt.addEventListener("input", () => fit(prompt));
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("colour").addEventListener("change", () => this.recolour());
    byId("settings").addEventListener("change", () => this.saveSettings());
    addEventListener("pagehide", () => this.save());
  }

  restoreSettings() {
    const kept = read(localStorage, SETTINGS, {});
    for (const name of KEPT_FIELDS) if (kept[name]) byId(name).value = kept[name];
    byId("colour").checked = kept.colour === true;
    byId("settings").open = matchMedia("(min-width: 62rem)").matches;
    this.recolour();
  }

  saveSettings() {
    const kept = { colour: byId("colour").checked };
    for (const name of KEPT_FIELDS) kept[name] = byId(name).value;
    write(localStorage, SETTINGS, kept);
  }

  /** Offers the served models. The one chosen last stays chosen if it is still there. */
  offer(models) {
    const select = byId("model");
    const wanted = select.value || read(localStorage, SETTINGS, {}).model;
    if ([...select.options].map((option) => option.value).join("\n") === models.join("\n")) return;
    select.replaceChildren(...models.map((name) => new Option(name, name)));
    if (models.includes(wanted)) select.value = wanted;
  }

  // --- the conversation ---------------------------------------------------------------------------------------

  send(text) {
    if (this.running || !text.trim()) return;
    byId("prompt").value = "";
    fit(byId("prompt"));
    this.add(this.keep({ role: "user", content: text }));
    this.answer();
  }

  regenerate() {
    if (this.running || this.talk.at(-1)?.role !== "assistant") return;
    this.talk.pop();
    this.shown.pop().node.remove();
    this.answer();
  }

  clear() {
    this.stop();
    this.talk = [];
    for (const message of this.shown.splice(0)) message.node.remove();
    this.save();
    this.draw();
    byId("prompt").focus();
  }

  keep(message) {
    this.talk.push(message);
    return message;
  }

  add(message) {
    const shown = new Message(message, () => this.regenerate());
    this.shown.push(shown);
    this.list.append(shown.node);
    return shown;
  }

  // --- one answer ---------------------------------------------------------------------------------------------

  body() {
    const system = byId("system").value.trim();
    const before = this.talk.filter((m) => m.content).map(({ role, content }) => ({ role, content }));
    const body = {
      model: byId("model").value,
      messages: system ? [{ role: "system", content: system }, ...before] : before,
      stream: true,
      stream_options: { include_usage: true },
    };
    for (const name of NUMBERS) if (byId(name).value !== "") body[name] = byId(name).valueAsNumber;
    if (byId("colour").checked) body.logprobs = true;
    return body;
  }

  answer() {
    const body = this.body();
    const message = this.keep(newAnswer(body.model));
    const headers = { "x-millrace-resume": "1" };
    const open = async (signal) => {
      body.model ||= await firstModel(signal); // asked before the server has told what it serves
      return call("/v1/chat/completions", { method: "POST", body, signal, headers });
    };
    return this.run(message, this.add(message), open);
  }

  resumeAfterReload() {
    const message = this.talk.at(-1);
    if (!message || message.role !== "assistant" || message.ended) return;
    const shown = this.shown.at(-1);
    if (message.stream?.id) this.run(message, shown, (signal) => this.reopen(message, signal));
    else this.end(message, shown, "This answer was interrupted before the server had taken it up.");
  }

  reopen(message, signal) {
    const headers = message.stream.last ? { "last-event-id": message.stream.last } : {};
    return call(`/v1/streams/${encodeURIComponent(message.stream.id)}`, { headers, signal });
  }

  /** Follows an answer to its end, over lost connections as well. */
  async run(message, shown, open) {
    const running = (this.running = { message, shown, stopped: new AbortController() });
    const { signal } = running.stopped;
    this.draw();
    let trouble = "";
    try {
      for (let retries = 0; !message.ended; retries++) {
        const last = message.stream?.last;
        try {
          if (await this.follow(await open(signal), running)) break;
        } catch (error) {
          if (!AWAY.includes(error.status) || !message.stream?.id) throw error; // it has spoken, or we have stopped it
        }
        if (message.stream.last !== last) retries = 0;
        if (retries >= MAX_RETRIES) throw new ApiError(0, "The connection was lost.");
        shown.waiting(true);
        await pause(250 * 2 ** retries, signal);
        open = (again) => this.reopen(message, again);
      }
    } catch (error) {
      trouble = error.name === "AbortError" ? "" : error.message;
    }
    if (this.running === running) this.running = null;
    this.end(message, shown, trouble);
  }

  /** Reads a response; says whether the answer is complete. */
  async follow(response, { message, shown }) {
    const id = response.headers.get("x-millrace-stream-id"); // told before there is anything to say
    if (id) {
      message.stream = { ...message.stream, id };
      this.save();
    }
    for await (const event of events(response)) {
      if (event.id) message.stream = { ...message.stream, last: event.id };
      if (event.data === "[DONE]") return true;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      take(message, chunk);
      shown.waiting(false);
      shown.later(() => this.follows());
      if (performance.now() - this.savedAt > SAVE_EVERY_MS) this.save();
    }
    return false;
  }

  stop() {
    const running = this.running;
    if (!running) return;
    const { message, stopped } = running;
    message.finish = "stopped";
    stopped.abort();
    // A resumable answer outlives its connection: it is ended by name.
    if (message.stream?.id) call(`/v1/streams/${encodeURIComponent(message.stream.id)}`, { method: "DELETE", quiet: true }).catch(() => {});
  }

  end(message, shown, trouble) {
    message.ended = true;
    message.trouble = trouble;
    delete message.stream;
    shown.waiting(false);
    shown.draw();
    this.save();
    this.draw();
    say(byId("spoken"), trouble || (message.finish === "stopped" ? "Stopped." : "The answer is complete."));
  }

  // --- what is seen -------------------------------------------------------------------------------------------

  draw() {
    byId("hint").hidden = this.shown.length > 0;
    byId("send").hidden = this.running !== null;
    byId("stop").hidden = this.running === null;
    this.shown.forEach((shown, index) => shown.offerAgain(index === this.shown.length - 1 && !this.running));
    if (this.running) this.running.shown.waiting(!this.running.message.content);
    this.list.scrollTop = this.list.scrollHeight;
  }

  /** Keeps the end in view while an answer grows, unless its reader has scrolled up. */
  follows() {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    if (scrollHeight - scrollTop - clientHeight < 120) this.list.scrollTop = scrollHeight;
  }

  recolour() {
    const on = byId("colour").checked;
    byId("scale").hidden = !on;
    this.list.classList.toggle("coloured", on);
    for (const shown of this.shown) shown.draw();
  }

  save() {
    this.savedAt = performance.now();
    if (!write(sessionStorage, TALK, this.talk)) {
      // The room is small: the text comes first.
      write(sessionStorage, TALK, this.talk.map((message) => ({ ...message, tokens: [] })));
    }
  }
}

async function firstModel(signal) {
  const { data } = await (await call("/v1/models", { signal })).json();
  return data[0]?.id ?? "";
}

/** Adds a chunk to a message. */
function take(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  for (const choice of chunk.choices) {
    const text = choice.delta?.content ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    if (text || thought) {
      message.firstAt ??= Date.now();
      message.lastAt = Date.now();
    }
    message.content += text;
    message.reasoning += thought;
    for (const { bytes, token, logprob } of choice.logprobs?.content ?? []) message.tokens.push({ bytes, token, logprob });
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 240)}px`;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, ms);
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
}

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // no room
  }
}
