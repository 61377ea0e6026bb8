// Sends the conversation's last message twice with one seed, and shows the tokens in which the two answers differ. The
// second time it is among other requests, or has other settings.

import { get } from "./api.js";
import { ENDS } from "./answer.js";
import { fill, occupy } from "./ask.js";
import { newAnswer } from "./conversation.js";
import { NumberFields } from "./options.js";
import { html, useMemo, useState } from "./preact.js";
import { SPECIAL } from "./tokens.js";

// Prompts of the other requests, and the number of answers to each. They are few, because a browser opens six connections
// to a server.
const OTHERS = [["Count to one thousand.", 11], ["Tell a long story about the sea.", 10], ["Describe a large city.", 10]];
const NUM_OTHERS = OTHERS.reduce((sum, [, num]) => sum + num, 0);
const MAX_CELLS = 4_000_000; // of the table that compares two answers; so many take 16 MB
const MOST_TOKENS = 128; // of an answer, if the settings have no bound
const IDS_TOO = { return_token_ids: true };

// A comparison: two answers to the message `asked`, with their titles.
function newPair(asked, options, titles) {
  const seed = options.seed || String(Math.floor(Math.random() * 2 ** 31));
  return {
    titles, isRunning: true, error: null, numRunning: null, abort: new AbortController(),
    answers: titles.map(() => newAnswer({ parent: asked })),
    options: { ...options, seed, max_tokens: options.max_tokens || MOST_TOKENS, logprobs: true },
  };
}

// Sends the message alone, and then among others. `show` draws the comparison, and `changed` draws it again.
export async function compareCrowd(asked, options, show, changed) {
  const pair = newPair(asked, options, ["Alone", `Among ${NUM_OTHERS} others`]);
  const [alone, among] = pair.answers;
  const { signal } = pair.abort;
  show(pair);
  await fill(alone, pair.options, changed, IDS_TOO);
  try {
    if (!alone.error && !signal.aborted) {
      await Promise.all(OTHERS.map(([text, num]) => occupy(options.model, text, num, signal)));
      let state = null; // that of the server while all are answered
      await fill(among, pair.options, () => { if (among.ids.length) state ??= get("state").catch(() => null); changed(); }, IDS_TOO);
      pair.numRunning = (await state)?.requests.running ?? null;
    }
  } catch (error) {
    if (error.name !== "AbortError") pair.error = error;
  }
  pair.abort.abort(); // the others
  pair.isRunning = false;
  changed();
}

// Sends the message with the settings, and at the same time with `others` in their place.
export async function compareSettings(asked, options, others, show, changed) {
  const given = Object.fromEntries(Object.entries(others).filter(([, value]) => value !== ""));
  const pair = newPair(asked, options, ["Settings", Object.entries(given).map((one) => one.join(" ")).join(", ")]);
  show(pair);
  const second = { ...pair.options, ...given };
  await Promise.all(pair.answers.map((answer, i) => fill(answer, i ? second : pair.options, changed, IDS_TOO)));
  pair.isRunning = false;
  changed();
}

export function stopPair(pair) {
  for (const { abort } of [pair, ...pair.answers]) abort?.abort();
}

// For each id of two lists whether both have it: in their longest common subsequence, between the beginning and the end
// that they share. If that part is too long to compare, none of its ids is common, and `isWhole` is false.
function common(left, right) {
  let from = 0, end = 0;
  const most = Math.min(left.length, right.length);
  while (from < most && left[from] === right[from]) from++;
  while (end < most - from && left.at(-1 - end) === right.at(-1 - end)) end++;
  const middles = [left, right].map((ids) => ids.slice(from, ids.length - end));
  const isWhole = middles[0].length * middles[1].length <= MAX_CELLS;
  const found = isWhole ? commonInside(...middles) : middles.map((ids) => ids.map(() => false));
  const same = (num) => new Array(num).fill(true);
  return { flags: found.map((side) => [...same(from), ...side, ...same(end)]), isWhole };
}

function commonInside(left, right) {
  const rows = [new Uint32Array(right.length + 1)];
  for (let i = 0; i < left.length; i++) {
    const above = rows[i], row = new Uint32Array(right.length + 1);
    for (let j = 0; j < right.length; j++) row[j + 1] = left[i] === right[j] ? above[j] + 1 : Math.max(above[j + 1], row[j]);
    rows.push(row);
  }
  const found = [new Array(left.length).fill(false), new Array(right.length).fill(false)];
  for (let i = left.length, j = right.length; i && j;) {
    if (left[i - 1] === right[j - 1]) found[0][--i] = found[1][--j] = true;
    else if (rows[i - 1][j] >= rows[i][j - 1]) i--;
    else j--;
  }
  return found;
}

// The form beside the conversation. `asked`: the message to answer, or null.
export function CompareForm({ asked, isRunning, crowd, settings }) {
  const [others, setOthers] = useState({});
  const isBlocked = !asked || isRunning;
  const isUnchanged = Object.values(others).every((value) => value === "");
  return html`
    <p class="quiet">${asked ? "The last message is answered twice with one seed, and the tokens that differ are counted."
      : "Write a message first. It can then be answered twice."}</p>
    <section><h2>Alone and among others</h2>
      <p class="quiet">The second time, ${NUM_OTHERS} other answers are written at the same time.</p>
      <button type="button" class="main" disabled=${isBlocked} onClick=${crowd}>Send alone and among others</button>
    </section>
    <section><h2>Two settings</h2>
      <p class="quiet">The second answer has these in place of the settings.</p>
      <div class="form"><${NumberFields} values=${others} placeholder="same" change=${setOthers} /></div>
      <button type="button" class="main" disabled=${isBlocked || isUnchanged} onClick=${() => settings(others)}>Send with both</button>
    </section>`;
}

// The two answers side by side, in place of the conversation.
export function Comparison({ pair, isDeterministic, close }) {
  const { answers, isRunning, titles } = pair;
  const compared = useMemo(() => (isRunning ? null : common(...answers.map((answer) => answer.ids))), [pair, isRunning]);
  const flags = compared?.flags;
  const error = pair.error ?? answers.find((answer) => answer.error)?.error;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Comparison">
      <div class="comparison">
        <p role="status" class=${error ? "failed" : ""}>${error ? error.message : verdictOf(pair, flags)}</p>
        ${compared && !compared.isWhole && html`<p class="quiet">All tokens between the first and the last difference are
          counted, because the answers are too long to compare there token by token.</p>`}
        ${!isDeterministic && html`<p class="quiet">This server runs without --deterministic, so other requests may change tokens.</p>`}
        <div class="pair">${answers.map((answer, i) => html`
          <section><h2>${titles[i]}</h2>
            <div class="tokens">${answer.tokens.map(({ text }, at) => html`
              <span class=${flags && !flags[i][at] ? "differs" : ""}>${isEnd(answer, at) ? "" : text}</span>`)}</div>
            ${flags && html`<p class="quiet">${endOf(answer)}</p>`}
          </section>`)}
        </div>
        <div class="buttons"><button type="button" onClick=${close}>${isRunning ? "Stop" : "Back to the chat"}</button></div>
      </div>
    </div>`;
}

// Whether a token is the one that ends an answer. Its text is no part of the answer.
const isEnd = ({ tokens, finishReason }, at) => finishReason === "stop" && at === tokens.length - 1 && SPECIAL.test(tokens[at].text);

const endOf = ({ finishReason }) => (finishReason === "stop" ? "The model ended it." : ENDS[finishReason] ?? "");

function verdictOf({ answers, numRunning }, flags) {
  if (!flags) return "Writing …";
  const num = Math.max(...flags.map((side) => side.filter((isCommon) => !isCommon).length));
  const beside = numRunning === null ? "" : ` ${numRunning} requests ran at the same time.`;
  return `${num} of ${Math.max(...answers.map((answer) => answer.ids.length))} tokens differ.${beside}`;
}
