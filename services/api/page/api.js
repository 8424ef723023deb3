// What the page says to the server: calls with the key of this tab, errors in the server's own words, event streams.

const KEY = "millrace.key";

/** An answer that is no success. `status` is 0 when the server was not reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Calls `keyNeeded` whenever the server refuses the key of this tab, or that there is none. */
export const listeners = { keyNeeded: () => {} };

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Makes a call; gives the response if it is a success, and throws an ApiError, or an AbortError, if not. */
export async function call(path, { method = "GET", body, headers = {}, signal, quiet = false } = {}) {
  const key = getKey();
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers: sent, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401 && !quiet) listeners.keyNeeded();
  const told = await response.json().catch(() => null);
  throw new ApiError(response.status, told?.error?.message ?? `The server answered ${response.status}.`);
}

function cut(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, "The connection was lost.");
}

/** Reads a response as server-sent events: `{id, data}` each, comments left out. A lost connection is an ApiError. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(cut);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = { id: "", data: "" };
        for (const line of part.split("\n")) {
          const [, field, text] = /^(id|data): ?(.*)$/.exec(line) ?? [];
          if (field) event[field] += text;
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}
