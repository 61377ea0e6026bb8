// Calls the server's routes with the key of this tab, and reads streams of events. It knows no component.

const KEY = "inferd-key";

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// A route's address, also if a proxy serves the page behind a prefix.
const address = (route) => new URL(route, document.baseURI);

// An answer that is no success. `retryAfterS` is null if the server did not say when to try again.
export class Refusal extends Error {
  constructor(message, { status = 0, code = "", retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfterS });
  }
}

export async function get(route, signal) {
  return (await send(route, { signal })).json();
}

const JSON_TYPE = { "Content-Type": "application/json" };

export async function post(route, body, signal) {
  const sent = body && { headers: JSON_TYPE, body: JSON.stringify(body) };
  return (await send(route, { method: "POST", ...sent, signal })).json();
}

// Yields the chunks of a streamed answer. Throws a `Refusal`, or an `AbortError` after `signal`.
export async function* stream(route, body, signal) {
  const response = await send(route, { method: "POST", headers: JSON_TYPE, body: JSON.stringify(body), signal });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message, { code: chunk.error.code ?? chunk.error.type });
    yield chunk;
  }
  throw new Refusal("The connection ended before the answer did. Try again.");
}

async function send(route, options) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(address(route), { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached. Check that it runs, and try again.");
  }
  if (response.ok) return response;
  throw await refusalOf(response);
}

async function refusalOf(response) {
  const { error } = await response.json().catch(() => ({}));
  const retry = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new Refusal(error?.message ?? `The server answered ${response.status} ${response.statusText}.`, {
    status: response.status,
    code: error?.code ?? error?.type,
    retryAfterS: Number.isFinite(retry) ? retry : null,
  });
}

// The data of each server-sent event. Comments, which keep the connection alive, are skipped.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The connection broke off. Try again.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
