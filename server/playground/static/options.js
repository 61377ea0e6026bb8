// The settings of requests: their form, and the fields that they become. Empty settings leave the server's defaults.

import { html } from "./preact.js";

const STORED = "inferd-options";
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top-k", { min: 0, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0, step: 0.05 }],
];
const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"];
const DEFAULTS = { model: "", system: "", reasoning_effort: "", schema: "", tools: "", logprobs: true };

export function storedOptions() {
  try {
    return { ...DEFAULTS, ...JSON.parse(sessionStorage.getItem(STORED) ?? "{}") };
  } catch {
    return DEFAULTS;
  }
}

export const storeOptions = (options) => sessionStorage.setItem(STORED, JSON.stringify(options));

// The fields of a request beside its messages. Throws an `Error` that names the box if a box holds no JSON.
export function fieldsOf(options) {
  const fields = { stream: true, stream_options: { include_usage: true }, include_metrics: true };
  if (options.model) fields.model = options.model;
  for (const [name] of NUMBERS) if (options[name]) fields[name] = Number(options[name]);
  if (options.reasoning_effort) fields.reasoning_effort = options.reasoning_effort;
  if (options.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  const schema = parsed(options.schema, "JSON schema", "an object", (value) => value && !Array.isArray(value));
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  const tools = parsed(options.tools, "Tools", "a list of functions", Array.isArray);
  if (tools) fields.tools = tools.map((tool) => (tool.type ? tool : { type: "function", function: tool }));
  return fields;
}

function parsed(text, box, what, isRight) {
  if (!text.trim()) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The box "${box}" holds no JSON: ${error.message}. Correct or empty it.`);
  }
  if (typeof value === "object" && isRight(value)) return value;
  throw new Error(`The box "${box}" must hold ${what}. Correct or empty it.`);
}

export const NumberFields = ({ values, placeholder, change }) => NUMBERS.map(([name, label, bounds]) => html`
  <label>${label}
    <input type="number" name=${name} placeholder=${placeholder} ...${bounds} value=${values[name] ?? ""}
      onInput=${(event) => change({ ...values, [name]: event.target.value })} />
  </label>`);

export function Options({ options, models, change }) {
  const set = (name) => (event) => change({ ...options, [name]: event.target.value });
  return html`
    <div class="form">
      <label class="wide">Model
        <select value=${options.model} onChange=${set("model")}>
          ${models.map((model) => html`<option value=${model}>${model}</option>`)}
        </select>
      </label>
      <label class="wide">System message
        <textarea rows="3" value=${options.system} onInput=${set("system")}></textarea>
      </label>
      <${NumberFields} values=${options} placeholder="default" change=${change} />
      <label>Reasoning effort
        <select value=${options.reasoning_effort} onChange=${set("reasoning_effort")}>
          <option value="">default</option>
          ${EFFORTS.map((effort) => html`<option value=${effort}>${effort}</option>`)}
        </select>
      </label>
      <label class="wide check">
        <input type="checkbox" checked=${options.logprobs}
          onChange=${(event) => change({ ...options, logprobs: event.target.checked })} />
        Ask for the probabilities of tokens
      </label>
      <label class="wide">JSON schema that answers follow
        <textarea class="code" rows="4" spellcheck="false" value=${options.schema} onInput=${set("schema")}
          placeholder='{"type": "object", ...}'></textarea>
      </label>
      <label class="wide">Tools, as a list of functions
        <textarea class="code" rows="4" spellcheck="false" value=${options.tools} onInput=${set("tools")}
          placeholder='[{"name": "get_weather", "parameters": {...}}]'></textarea>
      </label>
    </div>`;
}
