// The tokens of an answer, coloured by their probability, with the likeliest others in each place.

import { html, useState } from "./preact.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];
export const SPECIAL = /^<.*>$/; // the text of a special token cannot be sent back

const levelOf = (probability) => LEVELS.filter((level) => probability < level).length;
const percent = (probability) => `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)}%`;
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(no text)";

// `branch(index, other)` continues the answer with another token in place `index`. Null if the answer cannot have it.
export function Tokens({ tokens, branch }) {
  const [at, setAt] = useState(null); // place of the token whose alternatives are shown
  const [focus, setFocus] = useState(0); // place of the token that the Tab key reaches
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") setAt(null);
    if (!step || !event.target.matches(".token > button")) return;
    event.preventDefault();
    const next = Math.min(Math.max(focus + step, 0), tokens.length - 1);
    event.currentTarget.children[next].firstElementChild.focus();
  };
  return html`
    <div class="tokens" onKeyDown=${move} onMouseLeave=${() => setAt(null)}>
      ${tokens.map((token, index) => html`<${Token} key=${index} token=${token} isOpen=${index === at}
        isReached=${index === focus} open=${() => setAt(index)} reach=${() => { setFocus(index); setAt(index); }}
        branch=${branch && ((other) => branch(index, other))} />`)}
    </div>
    <p class="legend" aria-hidden="true">
      ${["90% or more", "60%", "30%", "10%", "less"].map((text, level) => html`<span class="p${level}">${text}</span>`)}
    </p>`;
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
