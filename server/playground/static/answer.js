// Shows the messages of a conversation: texts, reasoning, calls of tools, errors, and the buttons of each message.

import { Markdown, Plain } from "./markdown.js";
import { html, useEffect, useState } from "./preact.js";
import { Tokens } from "./tokens.js";

export function Message({ message, act }) {
  const shown = { user: UserMessage, assistant: Answer, tool: Results }[message.role];
  return html`<li class="message ${message.role}" data-role=${message.role}><${shown} message=${message} act=${act} /></li>`;
}

function Branches({ message, act }) {
  const siblings = message.parent.children;
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  return html`
    <span class="branches">
      <button type="button" aria-label="Earlier branch" disabled=${at === 0} onClick=${() => act.show(message, -1)}>‹</button>
      <span>${at + 1} of ${siblings.length}</span>
      <button type="button" aria-label="Later branch" disabled=${at === siblings.length - 1}
        onClick=${() => act.show(message, 1)}>›</button>
    </span>`;
}

function UserMessage({ message, act }) {
  const [draft, setDraft] = useState(null); // text while it is edited
  if (draft !== null) {
    const send = (event) => { event.preventDefault(); act.edit(message, draft); setDraft(null); };
    return html`
      <form class="edit" onSubmit=${send}>
        <textarea aria-label="Edited message" rows="3" value=${draft} onInput=${(event) => setDraft(event.target.value)}></textarea>
        <div class="buttons">
          <button class="main" disabled=${!draft.trim()}>Send</button>
          <button type="button" onClick=${() => setDraft(null)}>Cancel</button>
        </div>
      </form>`;
  }
  return html`
    <div class="bubble"><${Plain} text=${message.text} /></div>
    <div class="buttons">
      <${Branches} message=${message} act=${act} />
      <button type="button" onClick=${() => setDraft(message.text)}>Edit</button>
    </div>`;
}

function Answer({ message, act }) {
  const [showsTokens, setShowsTokens] = useState(Boolean(message.prefix));
  const { isRunning, tokens, text, error } = message;
  const isPlain = !isRunning && !message.reasoning && !message.calls.length && !message.isConstrained;
  return html`
    ${message.reasoning && html`<details class="reasoning"><summary>Reasoning${isRunning && !text ? " …" : ""}</summary>
      <${Plain} text=${message.reasoning} /></details>`}
    ${showsTokens && tokens.length
      ? html`${message.prefix && html`<div class="prefix"><${Plain} text=${message.prefix} /></div>`}
        <${Tokens} tokens=${tokens} branch=${isPlain ? (index, other) => act.branch(message, index, other) : null} />`
      : html`<${Markdown} text=${text} />`}
    ${isRunning && html`<p class="waiting" role="status">${text || message.reasoning ? "Writing" : "Waiting for the first token"}</p>`}
    ${message.calls.length > 0 && html`<${Calls} message=${message} act=${act} />`}
    ${error && html`<${Failure} error=${error} retry=${() => act.again(message)} />`}
    <div class="buttons">
      <${Branches} message=${message} act=${act} />
      ${!isRunning && !error && html`<button type="button" onClick=${() => act.again(message)}>Again</button>`}
      ${tokens.length > 0 && html`<button type="button" aria-pressed=${showsTokens}
        onClick=${() => setShowsTokens(!showsTokens)}>Tokens</button>`}
      <span class="facts">${factsOf(message)}</span>
    </div>
    ${!isRunning && message.metrics && html`<${Timeline} metrics=${message.metrics} usage=${message.usage} />`}`;
}

// The time that the server spent on an answer: in the queue, on the prompt up to the first token, and on the others.
function Timeline({ metrics, usage }) {
  const parts = [
    ["queue", metrics.queue_time_ms], ["prefill", metrics.time_to_first_token_ms], ["decode", metrics.generation_time_ms],
  ].filter(([, ms]) => ms != null);
  const notes = [`${metrics.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`];
  if (metrics.loaded_tokens) notes.push(`${metrics.loaded_tokens} of these from disk`);
  if (metrics.restarts) notes.push(`${metrics.restarts} engine restart${metrics.restarts > 1 ? "s" : ""}`);
  return html`
    <div class="timeline">
      <div class="bar" aria-hidden="true">
        ${parts.map(([name, ms]) => html`<span class=${name} style=${{ flexGrow: ms }}></span>`)}
      </div>
      <p class="key">
        ${parts.map(([name, ms]) => html`<span><i class=${name}></i>${name} ${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms</span>`)}
        ${notes.map((note) => html`<span>${note}</span>`)}
      </p>
    </div>`;
}

export const ENDS = { length: "cut at the most tokens", stopped: "stopped", content_filter: "filtered" };

function factsOf({ model, usage, ttftMs, tpotMs, finishReason }) {
  const facts = model ? [model] : [];
  if (usage) facts.push(`${usage.completion_tokens} tokens`);
  if (ttftMs != null) facts.push(`first after ${Math.round(ttftMs)} ms`);
  if (tpotMs != null) facts.push(`${(1000 / tpotMs).toFixed(0)} tokens/s`);
  if (ENDS[finishReason]) facts.push(ENDS[finishReason]);
  return facts.join(" · ");
}

// Calls of tools, each with a box for its result.
function Calls({ message, act }) {
  const [results, setResults] = useState({});
  const textOf = (call) => results[call.id] ?? "";
  const send = (event) => {
    event.preventDefault();
    act.answerCalls(message, message.calls.map((call) => ({ id: call.id, name: call.name, text: textOf(call) })));
  };
  return html`
    <form class="calls" onSubmit=${send}>
      ${message.calls.map((call) => html`
        <div class="call">
          <code>${call.name}(${call.text})</code>
          <label>Result of ${call.name}
            <textarea class="code" rows="2" value=${textOf(call)} disabled=${message.isRunning}
              onInput=${(event) => setResults({ ...results, [call.id]: event.target.value })}></textarea>
          </label>
        </div>`)}
      <button class="main" disabled=${message.isRunning || !message.calls.every(textOf)}>Send results</button>
    </form>`;
}

function Results({ message, act }) {
  return html`
    ${message.results.map(({ name, text }) => html`<div class="bubble"><b>${name}</b> gave <${Plain} text=${text} /></div>`)}
    <div class="buttons"><${Branches} message=${message} act=${act} /></div>`;
}

// An error, with a button to try again. After a 429 the button counts down to the time that the server named.
function Failure({ error, retry }) {
  const [leftS, setLeftS] = useState(error.retryAfterS ?? 0);
  useEffect(() => {
    if (leftS <= 0) return undefined;
    const timer = setTimeout(() => setLeftS(leftS - 1), 1000);
    return () => clearTimeout(timer);
  }, [leftS]);
  return html`
    <div class="failure" role="alert">
      <p>${error.message}</p>
      ${error.code && html`<p class="code">${[error.status, error.code].filter(Boolean).join(" ")}</p>`}
      <button type="button" disabled=${leftS > 0} onClick=${retry}>Try again${leftS > 0 ? ` in ${Math.ceil(leftS)} s` : ""}</button>
    </div>`;
}
