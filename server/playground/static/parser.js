// Turns Markdown into HTML, as a worker: a text that takes long holds up no page. The page ends a worker that takes too long.
//
// All text of an answer stays visible, also where Markdown would drop it. Nesting and the number of elements are bounded.
// It knows neither the page nor its answers.

import { getDefaults, Lexer, Parser, Renderer } from "./marked.js";

const MAX_DEPTH = 16; // levels of quotes, lists and emphasis; what is deeper is text
const MAX_TAGS = 5000; // tags of one text, which bound the time to draw it
const MIN_BLOCK = 4096; // characters of HTML that are drawn together, because each drawing of a block has a fixed cost
const MAX_ADDRESS = 2000; // characters of a link's address, which many references may repeat

const escaped = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

class BoundedLexer extends Lexer {
  #depth = 0;

  blockTokens(source, tokens = [], isClipped = false) {
    return this.#within(source, tokens, () => super.blockTokens(source, tokens, isClipped));
  }

  inlineTokens(source, tokens = []) {
    return this.#within(source, tokens, () => super.inlineTokens(source, tokens));
  }

  #within(source, tokens, read) {
    if (this.#depth === MAX_DEPTH) {
      if (source) tokens.push({ type: "text", raw: source, text: source, escaped: false });
      return tokens;
    }
    this.#depth++;
    try {
      return read();
    } finally {
      this.#depth--;
    }
  }
}

// HTML and images in an answer are shown as they were written: nothing is loaded, and nothing can look like the page.
class VisibleRenderer extends Renderer {
  html({ text }) { return escaped(text); }
  image({ raw }) { return escaped(raw); }
  checkbox({ checked }) { return checked ? "☑ " : "☐ "; }
  def({ raw }) { return `<p>${escaped(raw)}</p>`; }

  code(token) {
    const language = token.lang ? `<p><code>${escaped(token.lang)}</code></p>` : "";
    return language + super.code(token);
  }

  link(token) {
    const isShort = token.href.length + (token.title?.length ?? 0) <= MAX_ADDRESS;
    return isShort && token.text.trim() ? super.link(token) : escaped(token.raw);
  }

  // A row may have more cells than the head, and a table would drop them.
  table(token) {
    const [head, ...rows] = token.raw.trimEnd().split("\n").map(numCells);
    return rows.some((num) => num > head) ? `<pre>${escaped(token.raw)}</pre>` : super.table(token);
  }
}

const numCells = (row) => row.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).length;

// The blocks of a text: `{ html }`, or `{ text }` from the block on that has too many tags.
function blocksOf(source) {
  const options = { ...getDefaults(), renderer: new VisibleRenderer() };
  const tokens = new BoundedLexer(options).lex(source);
  const blocks = [];
  let numTags = 0;
  for (const [index, token] of tokens.entries()) {
    const html = new Parser(options).parse([token]);
    numTags += html.split("<").length - 1;
    if (numTags > MAX_TAGS) return [...blocks, { text: tokens.slice(index).map(({ raw }) => raw).join("") }];
    const last = blocks.at(-1);
    if (last?.html.length < MIN_BLOCK) last.html += html;
    else if (html) blocks.push({ html });
  }
  return blocks;
}

addEventListener("message", ({ data }) => {
  try {
    postMessage({ blocks: blocksOf(data) });
  } catch (error) {
    postMessage({ fault: String(error) });
  }
});
postMessage({ isReady: true });
