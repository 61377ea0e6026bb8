// The tokens of an answer, coloured by their probability, with the likeliest others in each place.

import { Plain } from "./markdown.js";
import { html, useMemo, useRef, useState } from "./preact.js";

const MAX_SHOWN = 8000; // tokens that are coloured, from the first on; the others are plain text
const SLICE = 200; // tokens that are drawn together
const LEVELS = [0.9, 0.6, 0.3, 0.1];
export const SPECIAL = /^<.*>$/; // the text of a special token cannot be sent back

const levelOf = (probability) => LEVELS.filter((level) => probability < level).length;
const percent = (probability) => `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)}%`;
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(no text)";

// `branch(index, other)` continues the answer with another token in place `index`. Null if the answer cannot have it.
export function Tokens({ tokens, branch }) {
  const [at, setAt] = useState(null); // place of the token whose alternatives are shown
  const [focus, setFocus] = useState(0); // place of the token that the Tab key reaches
  const newestBranch = useRef(null);
  newestBranch.current = branch;
  const numShown = Math.min(tokens.length, MAX_SHOWN);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") setAt(null);
    if (!step || !event.target.matches(".token > button")) return;
    event.preventDefault();
    const next = Math.min(Math.max(focus + step, 0), numShown - 1);
    event.currentTarget.children[next].firstElementChild.focus();
  };
  return html`
    <div class="tokens" onKeyDown=${move} onMouseLeave=${() => setAt(null)}>
      ${Array.from({ length: Math.ceil(numShown / SLICE) }, (_, i) => html`
        <${Slice} key=${i} tokens=${tokens} from=${i * SLICE} to=${Math.min((i + 1) * SLICE, numShown)} at=${at} focus=${focus}
          setAt=${setAt} setFocus=${setFocus} canBranch=${Boolean(branch)} newestBranch=${newestBranch} />`)}
    </div>
    ${tokens.length > numShown && html`
      <${Plain} text=${tokens.slice(numShown).map((token) => token.text).join("")} />
      <p class="quiet note">The first ${numShown.toLocaleString()} tokens are coloured.</p>`}
    <p class="legend" aria-hidden="true">
      ${["90% or more", "60%", "30%", "10%", "less"].map((text, level) => html`<span class="p${level}">${text}</span>`)}
    </p>`;
}

// Some tokens, which are drawn again only if one of them has changed.
function Slice({ tokens, from, to, at, focus, setAt, setFocus, canBranch, newestBranch }) {
  const inside = (index) => (index >= from && index < to ? index : null);
  const draw = () => tokens.slice(from, to).map((token, i) => {
    const index = from + i;
    return html`<${Token} key=${index} token=${token} isOpen=${index === at} isReached=${index === focus}
      open=${() => setAt(index)} reach=${() => { setFocus(index); setAt(index); }}
      branch=${canBranch && ((other) => newestBranch.current(index, other))} />`;
  });
  return useMemo(draw, [tokens, from, to, inside(at), inside(focus), canBranch]);
}

function Token({ token, isOpen, isReached, open, reach, branch }) {
  const text = token.text.replaceAll("\n", "↵\n") || "␣";
  return html`<span class="token" onMouseEnter=${open}><button type="button" class="p${levelOf(token.probability)}"
    tabindex=${isReached ? 0 : -1} onFocus=${reach} aria-expanded=${isOpen}
    aria-label=${text.trim() ? undefined : visible(token.text)}>${text}</button>${
    isOpen && html`<${Alternatives} token=${token} branch=${branch} />`}</span>`;
}

function Alternatives({ token, branch }) {
  const isKnown = token.likely.some((one) => one.text === token.text);
  const rows = isKnown ? token.likely : [...token.likely, token];
  return html`
    <span class="alternatives" role="group" aria-label="Likely tokens in this place" ref=${keepInside}>
      ${rows.map((one) => html`
        <button type="button" class=${one.text === token.text ? "drawn" : ""} onClick=${() => branch(one)}
          disabled=${!branch || one.text === token.text || SPECIAL.test(one.text)}>
          <span class="text">${visible(one.text)}</span>
          <meter min="0" max="1" value=${one.probability} aria-hidden="true"></meter>
          <span class="number">${percent(one.probability)}</span>
        </button>`)}
      <span class="hint">${branch ? "Choose a token to continue from it."
        : "Only a finished answer of plain text, without a schema, can be continued from a token."}</span>
    </span>`;
}

// A list near the right edge grows to the left.
function keepInside(list) {
  if (!list) return;
  const page = list.closest(".tokens").getBoundingClientRect();
  list.classList.toggle("left", list.parentElement.getBoundingClientRect().left + list.offsetWidth > page.right);
}
