// A conversation as a tree of messages: an edited message or another answer is a branch. It knows no component.

let numMessages = 0;

// A message: role "user", "assistant" or "tool". Its children are the branches that follow it, one of them shown.
export function newMessage(role, fields = {}) {
  return { id: ++numMessages, role, text: "", children: [], shown: 0, parent: null, ...fields };
}

export const newAnswer = (fields = {}) =>
  newMessage("assistant", { model: "", prefix: "", reasoning: "", calls: [], tokens: [], ids: [], isRunning: false, error: null, ...fields });

export const newConversation = () => newMessage("root");

// Adds a branch behind `parent` and shows it.
export function add(parent, message) {
  message.parent = parent;
  parent.shown = parent.children.push(message) - 1;
  return message;
}

export function show(message, step) {
  const { parent } = message;
  parent.shown = Math.min(Math.max(parent.shown + step, 0), parent.children.length - 1);
}

// The messages that are shown, from the first to the last.
export function shownPath(root) {
  const path = [];
  for (let at = root.children[root.shown]; at; at = at.children[at.shown]) path.push(at);
  return path;
}

// The messages of a request that asks for an answer behind `last`.
export function messagesUpTo(last, system) {
  const path = [];
  for (let at = last; at.role !== "root"; at = at.parent) path.unshift(...wireOf(at));
  return system.trim() ? [{ role: "system", content: system }, ...path] : path;
}

function wireOf(message) {
  if (message.role === "tool") {
    return message.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
  }
  if (message.role === "user") return [{ role: "user", content: message.text }];
  const wire = { role: "assistant", content: message.text };
  if (message.reasoning) wire.reasoning = message.reasoning;
  if (message.calls.length) {
    wire.tool_calls = message.calls.map(({ id, name, text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return [wire];
}

// Adds one chunk of a stream to an answer.
export function take(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.metrics) answer.metrics = chunk.metrics;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { delta } = choice;
  answer.firstTokenMs ??= delta.content || delta.reasoning || delta.tool_calls ? performance.now() : undefined;
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning ?? "";
  for (const call of delta.tool_calls ?? []) takeCall(answer.calls, call);
  for (const token of choice.logprobs?.content ?? []) answer.tokens.push(tokenOf(token));
  answer.ids.push(...(choice.token_ids ?? []));
  answer.finishReason = choice.finish_reason ?? answer.finishReason;
}

function takeCall(calls, delta) {
  calls[delta.index] ??= { id: delta.id, name: "", text: "", result: "" };
  calls[delta.index].name += delta.function.name ?? "";
  calls[delta.index].text += delta.function.arguments ?? "";
}

const tokenOf = ({ token, bytes, logprob, top_logprobs }) => ({
  text: token, bytes, probability: Math.exp(logprob),
  likely: top_logprobs.map((one) => ({ text: one.token, bytes: one.bytes, probability: Math.exp(one.logprob) })),
});

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

// The text of an answer up to token `index`, with `other` in its place. Null if it ends within a character.
export function textWith(answer, index, other) {
  const bytes = [...answer.tokens.slice(0, index), other].flatMap((token) => token.bytes);
  try {
    return answer.prefix + decoder.decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}
