// Texts with their vectors: reads texts, has them embedded, and finds those nearest to a query. It knows no component.

import { post } from "./api.js";

const MOST_TEXTS = 20_000;
const MOST_BYTES = 64 * 2 ** 20; // of a file
const BATCH_TEXTS = 64; // of one request: so many that its overhead is small, and so few that a query need not wait long
const BATCH_CHARS = 100_000;
const NUM_FOUND = 20;
const ASK_MS = 150; // from the last key to the request

// Texts, and a query to them. `field` is the one of JSON lines that holds the text.
export const newSearch = () => ({
  wanted: "", model: "", pasted: "", file: null, field: "text",
  texts: [], vectors: null, width: 0, numDone: 0, isRunning: false, run: null, perSecond: 0, error: null,
  query: "", vector: null, answered: "", found: [], rankedBy: "", isAsking: false, asking: null, timer: null, refusal: null, searchMs: 0,
});

// Keeps a file's content in place of pasted texts. Its end says whether its lines are JSON.
export async function open(search, file, changed) {
  search.error = null;
  try {
    if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${file.size.toLocaleString()} bytes, and this page reads at most `
      + `${MOST_BYTES.toLocaleString()}. Choose a smaller file, or use inferd embed.`);
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    search.file = { name: file.name, text, isJson: /\.(jsonl|ndjson)$/i.test(file.name) };
  } catch (error) {
    search.error = error instanceof TypeError ? new Error(`${file.name} is no text in UTF-8. Choose another file.`) : error;
  }
  changed();
}

// Embeds the texts that were given from the first one on. Vectors of an earlier run are dropped.
export async function embed(search, model, changed) {
  stop(search);
  Object.assign(search, { model, texts: [], vectors: null, width: 0, numDone: 0, vector: null, found: [], rankedBy: "", error: null });
  try {
    search.texts = textsOf(search);
  } catch (error) {
    search.error = error;
    return changed();
  }
  askSoon(search, search.query, changed);
  return goOn(search, changed);
}

// Embeds the texts that have no vector yet, one batch after another, until `stop`. Ends with its error, if there was one.
export async function goOn(search, changed) {
  const run = new AbortController();
  const begunMs = performance.now(), numBefore = search.numDone;
  Object.assign(search, { run, isRunning: true, error: null });
  changed();
  try {
    while (search.numDone < search.texts.length) {
      const batch = batchFrom(search.texts, search.numDone);
      const vectors = await embedded(search.model, batch, "document", run.signal, { priority: 1 }); // behind queries
      if (search.run !== run) return;
      keep(search, vectors);
      search.perSecond = (1000 * (search.numDone - numBefore)) / (performance.now() - begunMs);
      find(search);
      changed();
    }
  } catch (error) {
    if (search.run !== run) return;
    if (error.name !== "AbortError") search.error = error;
  }
  search.isRunning = false;
  changed();
}

export const stop = (search) => search.run?.abort();

// Asks for a query's neighbours once its writer pauses. Whatever was asked before is given up.
export function askSoon(search, query, changed) {
  clearTimeout(search.timer);
  search.asking?.abort();
  const isAsking = Boolean(search.model && query.trim());
  Object.assign(search, { query, isAsking, refusal: null });
  if (isAsking) search.timer = setTimeout(() => ask(search, changed), ASK_MS);
  else Object.assign(search, { vector: null, found: [], rankedBy: "" });
  changed();
}

const ask = (search, changed) => asked(search, changed, async (signal) => {
  const { query } = search;
  [search.vector] = await embedded(search.model, [query], "query", signal);
  Object.assign(search, { answered: query, rankedBy: "" });
  find(search);
});

// Reorders what was found by a reranker's scores.
export const rerank = (search, model, changed) => asked(search, changed, async (signal) => {
  const documents = search.found.map(({ text }) => text);
  const body = { model, query: search.answered, documents, return_documents: false, truncate_prompt_tokens: -1 };
  const { results } = await post("v1/rerank", body, signal);
  search.found = results.map(({ index, relevance_score: score }) => ({ ...search.found[index], score }));
  search.rankedBy = model;
});

// The newest of these tasks alone changes what is shown: it ends the one before it, whose request then fails.
async function asked(search, changed, task) {
  search.asking?.abort();
  const asking = new AbortController();
  Object.assign(search, { asking, isAsking: true, refusal: null });
  changed();
  try {
    await task(asking.signal);
  } catch (error) {
    if (asking.signal.aborted) return;
    search.refusal = error;
  }
  search.isAsking = false;
  changed();
}

// Finds the neighbours among the texts that have vectors. An order by a reranker stays.
function find(search) {
  if (!search.vector || search.rankedBy) return;
  const begunMs = performance.now();
  search.found = nearest(search, search.vector).map((one) => ({ ...one, text: search.texts[one.index] }));
  search.searchMs = performance.now() - begunMs;
}

// The indexes and cosines of the texts nearest to a vector, the nearest first. All vectors have length 1. Four sums let
// the processor add beside each other.
export function nearest({ vectors, width, numDone }, query) {
  const found = [];
  for (let index = 0, at = 0; index < numDone; index++) {
    let a = 0, b = 0, c = 0, d = 0, i = 0;
    for (; i + 3 < width; i += 4, at += 4) {
      a += vectors[at] * query[i];
      b += vectors[at + 1] * query[i + 1];
      c += vectors[at + 2] * query[i + 2];
      d += vectors[at + 3] * query[i + 3];
    }
    for (; i < width; i++, at++) a += vectors[at] * query[i];
    const cosine = a + b + c + d;
    if (found.length === NUM_FOUND && !(cosine > found.at(-1).cosine)) continue;
    let place = found.length;
    while (place > 0 && cosine > found[place - 1].cosine) place--;
    found.splice(place, 0, { index, cosine });
    if (found.length > NUM_FOUND) found.pop();
  }
  return found;
}

// One vector of length 1 for each text. Long texts are cut.
async function embedded(model, texts, side, signal, more = {}) {
  const fields = { input_type: side, normalize: true, truncate_prompt_tokens: -1, encoding_format: "base64", ...more };
  const { data } = await post("v1/embeddings", { model, input: texts, ...fields }, signal);
  return data.map(({ embedding }) => floatsOf(embedding));
}

function floatsOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

function keep(search, vectors) {
  search.width = vectors[0].length;
  search.vectors ??= new Float32Array(search.texts.length * search.width);
  for (const vector of vectors) search.vectors.set(vector, search.width * search.numDone++);
}

function batchFrom(texts, first) {
  let end = first, numChars = 0;
  while (end < texts.length && end - first < BATCH_TEXTS && (end === first || numChars + texts[end].length <= BATCH_CHARS)) {
    numChars += texts[end++].length;
  }
  return texts.slice(first, end);
}

// The texts of a file's or of the pasted lines, without those that are blank.
function textsOf({ pasted, file, field }) {
  const lines = (file?.text ?? pasted).split(/\r?\n/);
  const texts = [];
  for (const [i, line] of lines.entries()) {
    if (!line.trim()) continue;
    if (texts.push(file?.isJson ? textIn(line, field, i + 1) : line) > MOST_TEXTS) {
      throw new Error(`There are more than ${MOST_TEXTS.toLocaleString()} texts. Take fewer, or use inferd embed.`);
    }
  }
  if (texts.length) return texts;
  throw new Error("There is no text. Write one a line, or choose a file.");
}

function textIn(line, field, number) {
  let value;
  try {
    value = JSON.parse(line);
  } catch (error) {
    throw new Error(`Line ${number} is no JSON: ${error.message}. Correct it, or name the file .txt.`);
  }
  const text = typeof value === "string" ? value : value?.[field];
  if (typeof text === "string" && text.trim()) return text;
  const keys = value && typeof value === "object" ? Object.keys(value).slice(0, 20).join(", ") : "";
  throw new Error(`Line ${number} has no text in "${field}". ${keys ? `Its fields are ${keys}: name one of them.` : "It must be an object."}`);
}
