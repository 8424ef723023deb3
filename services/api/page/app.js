// The page: its two views, the key of this tab, and the regular look at the pipeline that both views live on.

import { call, getKey, listeners, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, say } from "./dom.js";
import { Pipeline } from "./pipeline.js";

const LOOK_MS = { chat: 5000, pipeline: 1000 };

const chat = new Chat();
const pipeline = new Pipeline();
let view = "";
let timer = 0;
let declined = false; // those who closed the question for a key are asked again only by what they do

function choose() {
  view = location.hash === "#pipeline" ? "pipeline" : "chat";
  for (const name of ["chat", "pipeline"]) {
    byId(name).hidden = name !== view;
    if (name === view) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  if (view === "chat") chat.draw();
  look();
}

/** Looks at the pipeline, and again after a while; not while nobody sees the page. */
async function look() {
  clearTimeout(timer);
  if (document.hidden || byId("key-dialog").open) return;
  try {
    const response = await call(`/v1/pipeline?since=${pipeline.since}`, { quiet: declined });
    const picture = await response.json();
    pipeline.take(picture);
    chat.offer(picture.models);
    sayHealth(picture);
  } catch (error) {
    health("away", error.status === 401 ? "key needed" : "server away");
  }
  clearTimeout(timer);
  timer = setTimeout(look, LOOK_MS[view]);
}

function sayHealth({ connected, missing }) {
  if (connected && !missing.length) health("well", "ready");
  else health("ill", `missing: ${missing.join(", ") || "broker"}`);
}

function health(state, text) {
  byId("health").dataset.state = state;
  say(byId("health"), text);
}

function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key").value = getKey();
  dialog.showModal();
}

listeners.keyNeeded = askForKey;
byId("key-button").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => {
  declined = true;
  byId("key-dialog").close();
});
byId("key-dialog").addEventListener("cancel", () => (declined = true)); // by the Escape key
byId("key-dialog").addEventListener("close", look);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  declined = false; // a wrong one is asked for again
  byId("key-dialog").close();
});
addEventListener("hashchange", choose);
document.addEventListener("visibilitychange", look);
choose();
