// A live view of the engines: reads /state every second while the page is visible, and keeps the last two minutes.
// Shows one of the models, and the tenants of all.

import { get, post, storedKey } from "./api.js";
import { html, useEffect, useState } from "./preact.js";

const PERIOD_MS = 1000;
const NUM_KEPT = 120;
const NUM_STEPS = 60; // most steps that the server lists one by one
const TOP_MEDIANS = 4; // a step of so many medians or more has a bar of full height
const STATUS = {
  leaving: "shutting down", failed: "failed", unavailable: "no engine",
  recovering: "starting another engine; requests wait", starting: "starting", loading: "loading; requests wait",
  paused: "paused; requests are refused", sleeping: "asleep; requests are refused",
  ready: "ready", unloaded: "unloaded; the next request loads it", unreachable: "cannot be reached",
};
// Of several models, the first of these statuses that one of them has is the server's.
const WORST_FIRST = [
  "leaving", "failed", "unavailable", "recovering", "starting", "loading", "paused", "sleeping", "ready", "unloaded",
];
const NOT_LOADED = ["unloaded", "paused", "sleeping", "failed"];
const PHASES = ["prefill", "decode", "mixed"];
const BOUND_BY = { compute: "by compute", memory: "by memory bandwidth", host: "by the host" };

// The newest state (null before the first), and by each model's id the history of some of its numbers.
export function useEngineState() {
  const [seen, setSeen] = useState({ state: null, history: {}, isReachable: true });
  useEffect(() => {
    const poll = async () => {
      if (document.hidden) return;
      try {
        const state = await get("state", AbortSignal.timeout(5000));
        setSeen(({ history }) => ({ state, isReachable: true, history: longer(history, state) }));
      } catch {
        setSeen((last) => ({ ...last, isReachable: false }));
      }
    };
    poll();
    const timer = setInterval(poll, PERIOD_MS);
    document.addEventListener("visibilitychange", poll);
    return () => { clearInterval(timer); document.removeEventListener("visibilitychange", poll); };
  }, []);
  return seen;
}

export const modelsOf = (state) => (state ? [state, ...(state.models ?? [])] : []);

const longer = (history, state) => Object.fromEntries(modelsOf(state).map(({ model, requests, kv_cache }) => {
  const sample = { running: requests.running, waiting: requests.waiting, used: kv_cache.used };
  return [model.id, [...(history[model.id] ?? []), sample].slice(-NUM_KEPT)];
}));

// The lamp of the server. It names the models with its status, if others are better.
export function Status({ seen: { state, isReachable } }) {
  const models = modelsOf(state);
  const found = WORST_FIRST.find((status) => models.some((one) => one.status === status)) ?? "starting";
  const status = isReachable ? found : "unreachable";
  const alike = models.filter((one) => one.status === status).map((one) => one.model.id);
  const isShared = status === "ready" || alike.length === 0 || alike.length === models.length;
  return html`
    <span class="status ${status}" role="status"><i aria-hidden="true"></i>
      <span>${isShared ? "" : `${alike.join(", ")}: `}${STATUS[status]}</span></span>`;
}

// `watched` is the id of the model that is shown, and `askKey` asks for a key.
export function Engine({ seen, watched, watch, askKey }) {
  const models = modelsOf(seen.state);
  if (models.length === 0) return html`<p class="quiet">Nothing is known of the engine yet.</p>`;
  const state = models.find((one) => one.model.id === watched) ?? models[0];
  return html`
    <${Facts} state=${state} models=${models} watch=${watch} />
    ${(models.length > 1 || storedKey() || state.status === "loading" || NOT_LOADED.includes(state.status))
      && html`<${LoadButtons} key=${state.model.id} state=${state} askKey=${askKey} />`}
    ${!NOT_LOADED.includes(state.status) && html`<${Activity} state=${state} history=${seen.history[state.model.id] ?? []} />`}
    ${seen.state.tenants && html`<${Tenants} tenants=${seen.state.tenants} areSeveral=${models.length > 1} />`}`;
}

function Facts({ state, models, watch }) {
  const { model, status, engine } = state;
  return html`
    <dl class="facts">
      <dt>Model</dt>
      <dd>${models.length === 1 ? model.id : html`
        <select aria-label="Model whose engine is shown" value=${model.id} onChange=${(event) => watch(event.target.value)}>
          ${models.map((one) => html`<option value=${one.model.id}>${one.model.id}</option>`)}
        </select>`}</dd>
      ${(models.length > 1 || status !== "ready") && html`<dt>Status</dt><dd class=${status}>${STATUS[status]}</dd>`}
      ${state.error && html`<dt>Reason</dt><dd class="failed">${state.error}</dd>`}
      ${engine && !NOT_LOADED.includes(status) && html`
        <dt>Computes on</dt><dd>${engine.device}, ${precisionOf(engine)}</dd>`}
      <dt>Context</dt><dd>${model.max_model_len.toLocaleString()} tokens</dd>
      <dt>Restarts</dt><dd>${state.restarts}</dd>
    </dl>`;
}

// Loads or unloads a model, which needs an admin key. /state shows how far it is.
function LoadButtons({ state, askKey }) {
  const [{ isRunning, refusal, what }, setTask] = useState({ isRunning: false, refusal: null });
  const id = state.model.id.split("/").map(encodeURIComponent).join("/");
  const start = async (what) => {
    setTask({ isRunning: true, refusal: null });
    const refusal = await post(`v1/models/${id}/${what}`).then(() => null, (error) => error);
    setTask({ isRunning: false, refusal, what });
  };
  const useKey = () => {
    setTask({ isRunning: false, refusal: null });
    askKey({ why: refusal.message, isAdmin: true, then: () => start(what) });
  };
  // A 403 without a key says that the server has no admin key.
  const canHaveKey = refusal?.status === 401 || (refusal?.status === 403 && storedKey());
  return html`
    <p class="buttons">
      <button type="button" disabled=${isRunning || !NOT_LOADED.includes(state.status)} onClick=${() => start("load")}>Load</button>
      <button type="button" disabled=${isRunning || state.status !== "ready"} onClick=${() => start("unload")}>Unload</button>
    </p>
    ${refusal && html`
      <div class="failure" role="alert"><p>${refusal.message}</p>
        ${canHaveKey && html`<button type="button" onClick=${useKey}>${storedKey() ? "Use another key" : "Use an admin key"}</button>`}
      </div>`}`;
}

const Activity = ({ state, history }) => html`
  <${Requests} requests=${state.requests} history=${history} />
  <${Blocks} cache=${state.kv_cache} prefix=${state.prefix_cache} history=${history} />
  <${Latencies} latencies=${state.latencies} targets=${state.targets} />
  <${Steps} steps=${state.newest_steps} phases=${state.last_minute} />
  <${Replicas} replicas=${state.replicas} />`;

const precisionOf = ({ dtype, quantization }) => (quantization === "none" ? dtype : `${quantization} weights, ${dtype}`);

function Requests({ requests, history }) {
  return html`
    <section><h2>Requests</h2>
      <p class="numbers"><b>${requests.running}</b> running <b>${requests.waiting}</b> waiting</p>
      <${Line} values=${history.map((one) => one.running)} label="Running requests in the last two minutes" />
    </section>`;
}

function Blocks({ cache, prefix, history }) {
  const free = Math.max(cache.blocks - cache.used - cache.cached, 0);
  const parts = [
    ["own", cache.used - cache.shared, "of one request"], ["shared", cache.shared, "of several"],
    ["cached", cache.cached, "cached"], ["free", free, "free"],
  ];
  const hits = prefix.query_tokens ? `${Math.round((100 * prefix.hit_tokens) / prefix.query_tokens)}%` : "none";
  return html`
    <section><h2>KV blocks</h2>
      <div class="bar" role="img" aria-label=${parts.map(([, count, words]) => `${count} ${words}`).join(", ")}>
        ${parts.map(([name, count]) => html`<span class=${name} style=${{ flexGrow: count }}></span>`)}
      </div>
      <p class="key">${parts.map(([name, count, words]) => html`
        <span><i class=${name}></i>${count.toLocaleString()} ${words}</span>`)}</p>
      <${Line} values=${history.map((one) => one.used)} most=${cache.blocks / 10} label="Used KV blocks in the last two minutes" />
      <p class="quiet">Prompt tokens found in the cache: ${hits}</p>
    </section>`;
}

// A line of at most two minutes. Its top is the largest of the values, `most` and 1.
function Line({ values, label, most = 0 }) {
  const top = Math.max(1, most, ...values);
  const first = NUM_KEPT - values.length;
  const points = values.map((value, i) => `${first + i},${(30 - (28 * value) / top).toFixed(1)}`).join(" ");
  return html`
    <svg class="line" viewBox="0 0 ${NUM_KEPT - 1} 31" preserveAspectRatio="none" role="img" aria-label=${label}>
      <polyline points=${points} vector-effect="non-scaling-stroke" />
    </svg>`;
}

// The newest steps as bars, and each phase's last minute. Pointing at a bar describes its step.
function Steps({ steps, phases }) {
  const [pointed, setPointed] = useState(null); // place from the right, as bars move to the left
  const rows = Object.entries(phases).filter(([, phase]) => phase);
  const times = steps.map((step) => step.ms).sort((a, b) => a - b);
  const top = Math.min(times.at(-1), TOP_MEDIANS * times[times.length >> 1]);
  const heightOf = (step) => 33 * Math.min(1, step.ms / top);
  const first = NUM_STEPS - steps.length;
  const shown = steps.at(-1 - (pointed ?? 0));
  return html`
    <section><h2>Steps</h2>
      ${rows.length === 0 ? html`<p class="quiet">None in the last minute.</p>` : html`
        ${shown && html`
          <svg class="steps" viewBox="0 0 ${NUM_STEPS} 40" preserveAspectRatio="none" role="img"
            aria-label="The newest ${steps.length} steps. The longest took ${ms(times.at(-1))}." onMouseLeave=${() => setPointed(null)}>
            ${steps.map((step, i) => html`
              <g class=${step.phase} onMouseEnter=${() => setPointed(steps.length - 1 - i)}>
                <rect class="reach" x=${first + i} y="0" width="1" height="40" />
                <rect x=${first + i + 0.1} y=${34 - heightOf(step)} width="0.8" height=${heightOf(step)} />
                <rect class=${step.bound_by} x=${first + i} y="36" width="1" height="4" />
              </g>`)}
          </svg>
          <${Key} names=${PHASES} />
          <${Key} title="bound by" names=${Object.keys(BOUND_BY)} />
          <p class="quiet step">${pointed === null ? "Newest" : "Pointed at"}: ${wordsOf(shown)}</p>`}
        <table class="bounds">
          <thead><tr><th>Last minute</th><th>Steps</th><th>Median</th><th>Bound</th></tr></thead>
          <tbody>${rows.map(([name, phase]) => html`
            <tr><td>${name}</td><td>${phase.steps}</td><td>${ms(phase.median_step_ms)}</td>
              <td>${BOUND_BY[phase.bound_by]}</td></tr>`)}
          </tbody>
        </table>`}
    </section>`;
}

const Key = ({ title = "", names }) => html`
  <p class="key">${title} ${names.map((name) => html`<span><i class=${name}></i>${name}</span>`)}</p>`;
const wordsOf = (step) => `${step.phase}, ${counted(step.rows, "request")}, ${counted(step.tokens, "token")}, `
  + `${ms(step.ms)}, bound ${BOUND_BY[step.bound_by]}`;
const counted = (count, noun) => `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;

// All answers of the server in the last minute, beside its targets.
function Latencies({ latencies, targets }) {
  const rows = [
    ["First token", latencies.ttft, targets.ttft_ms], ["Each further token", latencies.tpot, targets.tpot_ms],
  ];
  const cell = (value, target) => html`<td class=${target !== null && value > target ? "late" : ""}>${ms(value)}</td>`;
  return html`
    <section><h2>Latency in the last minute</h2>
      <table>
        <thead><tr><th>Time</th><th>Median</th><th>p95</th><th>Target</th></tr></thead>
        <tbody>${rows.map(([name, latency, target]) => html`
          <tr><td>${name}</td>${cell(latency?.p50_ms, target)}${cell(latency?.p95_ms, target)}
            <td>${target === null ? "none" : ms(target)}</td></tr>`)}
        </tbody>
      </table>
    </section>`;
}

// Milliseconds in a narrow column: a second or more is written in seconds.
const ms = (value) => (value == null ? "–" : value < 1000 ? shortNumber(value, "ms") : shortNumber(value / 1000, "s"));
const shortNumber = (value, unit) => `${value.toFixed(value < 10 ? 1 : 0)} ${unit}`;

function Replicas({ replicas }) {
  return html`
    <section><h2>${replicas.length === 1 ? "Replica" : "Replicas"}</h2>
      <table>
        <thead><tr><th>No.</th><th>Status</th><th>Running</th><th>Waiting</th><th>KV in use</th></tr></thead>
        <tbody>${replicas.map((replica, i) => html`
          <tr><td>${i}</td><td class=${replica.status}>${replica.status}</td><td>${replica.requests.running}</td>
            <td>${replica.requests.waiting}</td><td>${(100 * replica.kv_cache_usage).toFixed(1)}%</td></tr>
          ${replica.reason && html`<tr><td></td><td colspan="4" class="failed">${replica.reason}</td></tr>`}`)}
        </tbody>
      </table>
    </section>`;
}

// Names are those of /metrics, so a server with many tenants counts some together.
const Tenants = ({ tenants, areSeveral }) => html`
  <section><h2>Tenants${areSeveral && " of all models"}</h2>
    <table class="tenants">
      <thead><tr><th>Name</th><th>Running</th><th>Waiting</th><th>Tokens</th><th>Refused</th></tr></thead>
      <tbody>${tenants.map((one) => html`
        <tr><td>${one.tenant}</td><td>${one.running}</td><td>${one.waiting}</td>
          <td>${one.tokens_last_minute.toLocaleString()}</td>
          <td class=${one.refused_last_minute ? "late" : ""}>${one.refused_last_minute}</td></tr>`)}
      </tbody>
    </table>
    <p class="quiet">Tokens of prompts and answers that ended, and refusals: in the last minute.</p>
  </section>`;
