// Shows texts of any length and content: `Markdown` formatted as far as it can be, and `Plain` as they are.
//
// The page stays responsive: a worker formats, at most `MAX_CHARS`, and drawing takes at most a quarter of the time. Text
// that is not formatted yet, or cannot be, is plain. New text is visible after `LATE_MS` at most, and then stays visible.

import { format } from "./formatter.js";
import { html, useEffect, useMemo, useRef, useState } from "./preact.js";

const MAX_CHARS = 100_000; // length of the beginning of a text that is formatted
const PIECE = 8192; // most characters of one element of plain text; a text that grows draws its last one alone
const LATE_MS = 300; // time after which new text is shown before it is formatted
const REST = 3; // multiple of the time of a drawing that passes before the next
const TAGS = ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
  "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ALLOWED = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "start"] };

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

export function Markdown({ text }) {
  const { shown, fault, isSlow, isBehind } = useFormatted(text);
  const isBeginning = text.startsWith(shown.text);
  const blocks = isBeginning ? shown.blocks : [];
  const rest = isBeginning ? text.slice(shown.text.length) : text;
  const numSeen = useRef(0); // characters that were visible
  const showsRest = isSlow || fault || !blocks.length || text.length > MAX_CHARS || text.length - rest.length < numSeen.current;
  numSeen.current = showsRest ? text.length : shown.text.length;
  return html`
    <div class="markdown" aria-busy=${isBehind}>
      ${blocks.map((block, index) => html`<${Block} key=${index} ...${block} />`)}
      ${rest && showsRest && html`<${Plain} key="rest" text=${rest.replace(/^\n+/, "")} />`}
    </div>
    ${noteOf(text, blocks, fault).map((note) => html`<p class="quiet note">${note}</p>`)}`;
}

function noteOf(text, blocks, fault) {
  if (fault) return [`The text that is not formatted is shown as it was written, because of its formatting: ${fault}.`];
  if (text.length > MAX_CHARS) return [`The first ${MAX_CHARS.toLocaleString()} characters are formatted. The others are shown as they were written.`];
  return blocks.some((block) => block.text) ? ["The end is shown as it was written: formatted, it has too many parts."] : [];
}

function Block({ html: __html, text }) {
  const clean = useMemo(() => __html && { __html: DOMPurify.sanitize(__html, ALLOWED) }, [__html]);
  return clean ? html`<div class="block" dangerouslySetInnerHTML=${clean}></div>` : html`<${Plain} text=${text} />`;
}

export function Plain({ text }) {
  const pieces = useMemo(() => piecesOf(text), [text]);
  return html`<div class="plain">${pieces.map((piece, index) => html`<div key=${index}>${piece}</div>`)}</div>`;
}

// Cuts a text after line ends where it can. The cuts stay where they are when the text grows.
function piecesOf(text) {
  const pieces = [];
  for (let from = 0; from < text.length;) {
    let to = Math.min(from + PIECE, text.length);
    if (to < text.length) {
      const end = text.lastIndexOf("\n", to - 1) + 1;
      if (end > from) to = end;
      else if (/[\uD800-\uDBFF]/.test(text[to - 1])) to--; // within a character
    }
    pieces.push(text.slice(from, to));
    from = to;
  }
  return pieces;
}

// The beginning of a text that is formatted at most.
function headOf(text) {
  if (text.length <= MAX_CHARS) return text;
  return text.slice(0, text.lastIndexOf("\n", MAX_CHARS - 1) + 1 || MAX_CHARS);
}

const NOTHING = { text: "", blocks: [] };
const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// Keeps a text formatted while it grows. `shown` is the newest that is formatted. After a fault it stays as it is.
function useFormatted(text) {
  const [shown, setShown] = useState(NOTHING);
  const [fault, setFault] = useState("");
  const [isSlow, setSlow] = useState(false);
  const head = headOf(text);
  const state = useRef({ newest: "", formatted: "", restMs: 0, isBusy: false, isGone: false }).current;
  state.newest = head;

  const keepUp = async () => {
    state.isBusy = true;
    while (state.formatted !== state.newest && !state.isGone) {
      const late = setTimeout(() => setSlow(true), LATE_MS);
      const begunMs = performance.now();
      await pause(state.restMs);
      const { text: formatted, blocks } = await format(() => (state.isGone ? null : state.newest));
      if (state.isGone) return;
      const drawnMs = performance.now();
      setShown({ text: formatted, blocks });
      state.formatted = formatted;
      await frame();
      state.restMs = REST * (performance.now() - drawnMs);
      clearTimeout(late);
      setSlow(performance.now() - begunMs > LATE_MS);
    }
    state.isBusy = false;
  };
  useEffect(() => () => { state.isGone = true; }, []);
  useEffect(() => {
    if (!state.isBusy) keepUp().catch((error) => { setFault(error.message); });
  }, [head]);
  return { shown, fault, isSlow, isBehind: !fault && shown.text !== head };
}
