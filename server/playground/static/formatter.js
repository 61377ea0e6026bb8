// Has a worker turn Markdown into HTML, one text at a time, and ends the worker if a text takes too long. It knows no
// component and no Markdown.

const TICK_MS = 250;
const LIMIT_MS = 2000; // time that one text may take
const START_MS = 20_000; // time in which a worker must have started

const waiting = []; // jobs, the newest last
let running = null;
let worker = null;

// Resolves to `{ text, blocks }`. `newest()` is the text, asked when its turn has come. If it is null, the blocks are null.
// The job that came last is next, so that the answer that grows is before those that are shown. Rejects with the reason.
export function format(newest) {
  return new Promise((resolve, reject) => {
    waiting.push({ newest, resolve, reject });
    next();
  });
}

function next() {
  if (running || !waiting.length) return;
  const { newest, resolve, reject } = waiting.pop();
  const text = newest();
  if (text === null) {
    resolve({ text, blocks: null });
    next();
    return;
  }
  // Ticks are counted, because no time passes for a worker while the machine sleeps.
  running = { text, resolve, reject, numTicks: 0, clock: setInterval(tick, TICK_MS) };
  try {
    worker ??= started();
    worker.postMessage(text);
  } catch (error) {
    giveUp(String(error));
  }
}

function started() {
  const port = new Worker(new URL("./parser.js", import.meta.url), { type: "module" });
  port.isReady = false;
  port.onmessage = ({ data }) => {
    if (!data.isReady) return end(data);
    port.isReady = true;
    if (running) running.numTicks = 0;
  };
  port.onerror = (event) => { event.preventDefault(); giveUp(event.message || "the worker could not be loaded"); };
  return port;
}

function tick() {
  const limitMs = worker.isReady ? LIMIT_MS : START_MS;
  if (++running.numTicks * TICK_MS > limitMs) giveUp(`it took more than ${limitMs / 1000} s`);
}

function giveUp(why) {
  if (worker) worker.onmessage = worker.onerror = null;
  worker?.terminate();
  worker = null;
  if (running) end({ fault: why });
}

function end({ blocks, fault }) {
  const { text, resolve, reject, clock } = running;
  clearInterval(clock);
  running = null;
  if (fault) reject(new Error(fault));
  else resolve({ text, blocks });
  next();
}
