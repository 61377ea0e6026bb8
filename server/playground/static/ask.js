// Asks the server for answers, and fills them as they stream. It knows no component.

import { stream } from "./api.js";
import { messagesUpTo, take } from "./conversation.js";
import { fieldsOf } from "./options.js";

const ROUTE = "v1/chat/completions";

// Fills an answer to the messages up to its parent. Ends with its error in it, if there was one. `extra`: further fields.
export async function fill(answer, options, changed, extra = {}) {
  const begunMs = performance.now();
  answer.abort = new AbortController();
  answer.isRunning = true;
  try {
    const fields = { ...fieldsOf(options), ...extra };
    answer.isConstrained = Boolean(fields.response_format);
    const messages = messagesUpTo(answer.parent, options.system);
    if (answer.prefix) {
      messages.push({ role: "assistant", content: answer.prefix });
      Object.assign(fields, { continue_final_message: true, add_generation_prompt: false });
    }
    for await (const chunk of stream(ROUTE, { ...fields, messages }, answer.abort.signal)) {
      take(answer, chunk);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finishReason = "stopped";
    else answer.error = error;
  }
  answer.isRunning = false;
  time(answer, begunMs);
  changed();
}

// The first token's time is that of the page's reader, so it contains the network. Chunks may hold several tokens, so
// the server says how long each further token took.
function time(answer, begunMs) {
  if (answer.firstTokenMs === undefined) return;
  answer.ttftMs = answer.firstTokenMs - begunMs;
  answer.tpotMs = answer.metrics?.mean_itl_ms ?? null;
}

// Keeps the server busy with `num` answers to `text` that do not end. Returns once they have begun, and leaves them to
// `signal`. Throws a `Refusal` if they cannot begin.
export async function occupy(model, text, num, signal) {
  const body = { model, messages: [{ role: "user", content: text }], n: num, ignore_eos: true, stream: true };
  const chunks = stream(ROUTE, body, signal);
  await chunks.next();
  (async () => { for await (const _ of chunks); })().catch(() => {});
}
