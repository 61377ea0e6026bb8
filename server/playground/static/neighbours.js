// The view of texts and their nearest neighbours, in place of the conversation.

import { html } from "./preact.js";
import { askSoon, embed, goOn, open, rerank, stop } from "./vectors.js";

const MOST_CHARS = 1000; // of a text that was found

// `models` have embeddings, and `rerankers` scores. `askKey` asks for a key because of an error.
export function Neighbours({ search, models, rerankers, changed, askKey }) {
  const dropped = (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file && !search.isRunning) open(search, file, changed);
  };
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Embeddings" onDragOver=${(event) => event.preventDefault()} onDrop=${dropped}>
      <div class="neighbours">
        <${Texts} search=${search} models=${models} changed=${changed} askKey=${askKey} />
        <${Progress} search=${search} changed=${changed} />
        ${search.texts.length > 0 && html`
          <${Query} search=${search} rerankers=${rerankers} changed=${changed} askKey=${askKey} />
          <${Found} search=${search} />`}
      </div>
    </div>`;
}

function Texts({ search, models, changed, askKey }) {
  const { file, isRunning } = search;
  const model = models.includes(search.wanted) ? search.wanted : models[0];
  const set = (name) => (event) => { search[name] = event.target.value; changed(); };
  const choose = ({ target }) => { if (target.files[0]) open(search, target.files[0], changed); target.value = ""; };
  const submit = (event) => { event.preventDefault(); embed(search, model, changed); };
  return html`
    <form class="form" onSubmit=${submit}>
      ${file ? html`
        <p class="wide">${file.name}, ${file.text.length.toLocaleString()} characters${" "}
          <button type="button" disabled=${isRunning} onClick=${() => { search.file = null; changed(); }}>Remove</button></p>`
      : html`
        <label class="wide">Texts, one a line
          <textarea rows="6" value=${search.pasted} onInput=${set("pasted")} disabled=${isRunning}></textarea>
        </label>`}
      <label>${file ? "Another" : "Or a"} file, with one text or one JSON object a line
        <input type="file" accept=".txt,.jsonl,.ndjson,.csv,.md,text/*" disabled=${isRunning} onChange=${choose} />
      </label>
      ${file?.isJson && html`
        <label>Field of the text
          <input value=${search.field} disabled=${isRunning} onInput=${set("field")} />
        </label>`}
      ${models.length > 1 && html`
        <label>Model that embeds
          <select value=${model} disabled=${isRunning} onChange=${set("wanted")}>
            ${models.map((one) => html`<option value=${one}>${one}</option>`)}
          </select>
        </label>`}
      <div class="wide buttons">
        ${isRunning
          ? html`<button type="button" class="main" onClick=${() => stop(search)}>Stop</button>`
          : html`<button class="main" disabled=${!file && !search.pasted.trim()}>Embed</button>`}
        ${!isRunning && search.numDone < search.texts.length && html`
          <button type="button" onClick=${() => goOn(search, changed)}>Go on</button>`}
      </div>
    </form>
    <${Failure} error=${search.error} askKey=${askKey} />`;
}

function Progress({ search: { texts, numDone, width, isRunning, perSecond } }) {
  if (texts.length === 0) return null;
  const counts = `${numDone.toLocaleString()} of ${texts.length.toLocaleString()} texts`;
  return html`
    <div>
      <progress max=${texts.length} value=${numDone} aria-label="Texts with a vector"></progress>
      <p class="quiet" role=${isRunning ? null : "status"}>${counts}${isRunning ? " have a vector" : ` have a vector of ${width} components`}
        ${perSecond > 0 && `, ${perSecond.toFixed(perSecond < 10 ? 1 : 0)} a second`}</p>
    </div>`;
}

function Query({ search, rerankers, changed, askKey }) {
  const { found, isAsking, isRunning, rankedBy, refusal } = search;
  return html`
    <div class="form">
      <label class="wide">Query
        <input type="search" autocomplete="off" value=${search.query} onInput=${(event) => askSoon(search, event.target.value, changed)} />
      </label>
    </div>
    ${found.length > 0 && rerankers.length > 0 && html`
      <div class="buttons">${rerankers.map((one) => html`
        <button type="button" aria-pressed=${rankedBy === one} disabled=${isAsking || isRunning}
          onClick=${() => rerank(search, one, changed)}>Reorder by ${one}</button>`)}</div>`}
    <${Failure} error=${refusal} askKey=${askKey} />`;
}

function Found({ search: { answered, found, isAsking, numDone, query, rankedBy, searchMs } }) {
  if (!query.trim()) return null;
  const order = rankedBy ? `by the scores of ${rankedBy}` : `of ${numDone.toLocaleString()}, found in ${searchMs.toFixed(1)} ms`;
  return html`
    <p class="quiet" role="status">${isAsking ? "Asking …" : found.length > 0 && `Nearest to “${answered}” ${order}`}</p>
    <ol class="found" aria-busy=${isAsking}>${found.map(({ index, text, cosine, score }) => html`
      <li key=${index}>
        <p class="plain" dir="auto">${clipped(text)}</p>
        <p class="quiet">No. ${(index + 1).toLocaleString()} · cosine ${cosine.toFixed(4)}${score !== undefined && ` · score ${score.toFixed(4)}`}${" "}
          <meter min="0" max="1" value=${cosine} aria-hidden="true"></meter></p>
      </li>`)}</ol>`;
}

function Failure({ error, askKey }) {
  if (!error) return null;
  return html`
    <div class="failure" role="alert"><p>${error.message}</p>
      ${error.status === 401 && html`<button type="button" onClick=${() => askKey(error)}>Use a key</button>`}
    </div>`;
}

// A part of a character at the end is left out.
const clipped = (text) => (text.length > MOST_CHARS ? `${text.slice(0, MOST_CHARS).replace(/[\ud800-\udbff]$/, "")} …` : text);
