// The page: its state, and what its buttons do. Answers are streamed into the conversation and drawn as they come.

import { get, Refusal, storedKey, storeKey } from "./api.js";
import { Message } from "./answer.js";
import { fill } from "./ask.js";
import { CompareForm, compareCrowd, compareSettings, Comparison, stopPair } from "./compare.js";
import { add, newAnswer, newConversation, newMessage, show, shownPath, textWith } from "./conversation.js";
import { Engine, modelsOf, Status, useEngineState } from "./engine.js";
import { Neighbours } from "./neighbours.js";
import { Options, storedOptions, storeOptions } from "./options.js";
import { html, render, useEffect, useRef, useState } from "./preact.js";
import { newSearch } from "./vectors.js";

const DRAW_MS = 60; // shortest time between two drawings of an answer that grows
const REST = 3;

// Draws the page again, soon, and at most every `DRAW_MS`. If a drawing takes long, the next waits for `REST` times as long.
function useDrawing() {
  const [, setCount] = useState(0);
  const state = useRef({ timer: null, begunMs: null, waitMs: DRAW_MS }).current;
  useEffect(() => {
    if (state.begunMs === null) return;
    state.waitMs = Math.max(DRAW_MS, REST * (performance.now() - state.begunMs));
    state.begunMs = null;
  });
  const draw = () => { state.timer = null; state.begunMs = performance.now(); setCount((count) => count + 1); };
  return () => { state.timer ??= setTimeout(draw, state.waitMs); };
}

function App() {
  const root = useRef(newConversation());
  const [options, setOptions] = useState(storedOptions);
  const search = useRef(newSearch());
  const [view, setView] = useState("Chat");
  const [tab, setTab] = useState("Engine");
  const [watched, setWatched] = useState(null); // the model whose engine is shown; null for the first
  const [asksKey, setAsksKey] = useState(null); // null, or { why: the server's words, isAdmin, then: what to do with the key }
  const [models, setModels] = useState([]);
  const [pair, setPair] = useState(null); // the comparison that is shown in place of the conversation
  const changed = useDrawing();
  const seen = useEngineState();

  const changeOptions = (next) => { setOptions(next); storeOptions(next); };
  const readModels = async () => {
    try {
      const { data } = await get("v1/models");
      setModels(data);
      setAsksKey(null);
      asksKey?.then?.();
      const chats = chatsOf(data);
      if (!chats.includes(options.model)) changeOptions({ ...options, model: chats[0] });
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) setAsksKey((last) => ({ ...last, why: storedKey() ? error.message : "" }));
    }
  };
  useEffect(() => { readModels(); }, []);

  const ask = async (parent, fields = {}) => {
    const answer = add(parent, newAnswer({ ...fields, model: models.length > 1 ? options.model : "" }));
    changed();
    await fill(answer, options, changed);
    if (answer.error?.status === 401) setAsksKey({ why: answer.error.message });
  };
  const showChat = () => { if (pair) stopPair(pair); setPair(null); };
  const say = (parent, text) => ask(add(parent, newMessage("user", { text })));
  const act = {
    show: (message, step) => { show(message, step); changed(); },
    again: (message) => ask(message.parent, { prefix: message.prefix, text: message.prefix }),
    edit: (message, text) => say(message.parent, text),
    answerCalls: (message, results) => ask(add(message, newMessage("tool", { results }))),
    branch: (message, index, other) => {
      const prefix = textWith(message, index, other);
      if (prefix !== null) ask(message.parent, { prefix, text: prefix });
    },
  };

  const chats = chatsOf(models), views = viewsOf(models);
  const isChat = (views.includes(view) ? view : views[0]) === "Chat";
  const tabs = isChat ? ["Engine", "Settings", "Compare"] : ["Engine"];
  const shownTab = tabs.includes(tab) ? tab : "Engine";
  const path = shownPath(root.current);
  const last = lastOf(root.current);
  const running = last.isRunning ? last : null;
  const asksModel = modelsOf(seen.state).find((one) => one.model.id === options.model) ?? seen.state;
  const asked = path.findLast((message) => message.role !== "assistant") ?? null;
  return html`
    <header>
      <h1>inferd</h1>
      <${Status} seen=${seen} />
      ${views.length > 1 && html`
        <span class="views">${views.map((name) => html`
          <button type="button" aria-pressed=${(name === "Chat") === isChat} onClick=${() => setView(name)}>${name}</button>`)}</span>`}
      ${isChat && html`<button type="button" class="last" disabled=${path.length === 0}
        onClick=${() => { showChat(); lastOf(root.current).abort?.abort(); root.current = newConversation(); changed(); }}>New chat</button>`}
    </header>
    <main>
      ${asksKey !== null && html`<${KeyForm} asked=${asksKey} done=${readModels} />`}
      ${!isChat ? html`
        <${Neighbours} search=${search.current} models=${madeFor(models, "embed")} rerankers=${madeFor(models, "rerank")} changed=${changed}
          askKey=${({ message: why }) => setAsksKey({ why })} />`
      : pair
        ? html`<${Comparison} pair=${pair} isDeterministic=${asksModel?.engine?.deterministic ?? true}
            close=${() => (pair.isRunning ? stopPair(pair) : setPair(null))} />`
        : html`<${Messages} path=${path} act=${act} />`}
      ${isChat && html`<${Composer} send=${(text) => { showChat(); say(lastOf(root.current), text); }} running=${running}
        isBlocked=${last.calls?.length > 0} models=${chats} model=${options.model}
        choose=${(model) => changeOptions({ ...options, model })} />`}
    </main>
    <aside aria-label=${isChat ? "Engine, settings and comparisons" : "Engine"}>
      <div class="tabs">
        ${tabs.map((name) => html`
          <button type="button" aria-pressed=${shownTab === name} onClick=${() => setTab(name)}>${name}</button>`)}
      </div>
      ${shownTab === "Engine" && html`<${Engine} seen=${seen} watched=${watched} watch=${setWatched} askKey=${setAsksKey} />`}
      ${shownTab === "Settings" && html`<${Options} options=${options} models=${chats} change=${changeOptions} />`}
      ${shownTab === "Compare" && html`<${CompareForm} asked=${asked} isRunning=${Boolean(running || pair?.isRunning)}
        crowd=${() => compareCrowd(asked, options, setPair, changed)}
        settings=${(others) => compareSettings(asked, options, others, setPair, changed)} />`}
    </aside>`;
}

const madeFor = (models, task) => models.filter((model) => model.task === task).map(({ id }) => id);

// The models to chat with. If none is made for it, all are listed, and the server says what they do.
function chatsOf(models) {
  const found = madeFor(models, "generate");
  return found.length ? found : models.map(({ id }) => id);
}

function viewsOf(models) {
  if (madeFor(models, "embed").length === 0) return ["Chat"];
  return madeFor(models, "generate").length ? ["Chat", "Embeddings"] : ["Embeddings"];
}

// The message that is shown last. A click may come before the page is drawn again, so its handler asks here.
const lastOf = (root) => shownPath(root).at(-1) ?? root;

function Messages({ path, act }) {
  const box = useRef(null), list = useRef(null);
  const follows = useRef(true); // whether the reader is at the end
  const top = useRef(0); // where the box was scrolled to, by the page or the reader
  const newest = useRef(0);
  const toEnd = () => {
    if (!follows.current) return;
    box.current.scrollTop = box.current.scrollHeight;
    top.current = box.current.scrollTop;
  };
  useEffect(() => {
    const sizes = new ResizeObserver(toEnd);
    sizes.observe(list.current);
    return () => sizes.disconnect();
  }, []);
  useEffect(() => {
    const id = path.at(-1)?.id ?? 0;
    if (id <= newest.current) return;
    newest.current = id;
    follows.current = true;
    toEnd();
  });
  // The text may have grown between the page's own scroll and this event, so only a scroll towards the top ends following.
  const scrolled = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    if (scrollHeight - scrollTop - clientHeight < 40) follows.current = true;
    else if (scrollTop < top.current) follows.current = false;
    top.current = scrollTop;
  };
  return html`
    <div class="scroll" ref=${box} onScroll=${scrolled} tabindex="0" role="region" aria-label="Conversation">
      ${path.length === 0 && html`<p class="empty">Write a message to begin. Everything stays on this server.</p>`}
      <ol class="messages" ref=${list}>${path.map((message) => html`<${Message} key=${message.id} message=${message} act=${act} />`)}</ol>
    </div>`;
}

function Composer({ send, running, isBlocked, models, model, choose }) {
  const [text, setText] = useState("");
  const canSend = text.trim() && !running && !isBlocked;
  const submit = (event) => {
    event.preventDefault();
    if (!canSend) return;
    send(text);
    setText("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      ${models.length > 1 && html`
        <label class="quiet">Model that answers
          <select value=${model} onChange=${(event) => choose(event.target.value)}>
            ${models.map((one) => html`<option value=${one}>${one}</option>`)}
          </select>
        </label>`}
      <textarea aria-label="Message" rows="3" value=${text} onKeyDown=${onKeyDown}
        placeholder=${isBlocked ? "Send the results of the calls first" : "Message (Enter sends, Shift+Enter begins a line)"}
        onInput=${(event) => setText(event.target.value)}></textarea>
      ${running
        ? html`<button type="button" class="main" onClick=${() => running.abort.abort()}>Stop</button>`
        : html`<button class="main" disabled=${!canSend}>Send</button>`}
    </form>`;
}

// Asks for an API key or an admin key. The browser forgets it with the tab.
function KeyForm({ asked: { why, isAdmin }, done }) {
  const [key, setKey] = useState("");
  const submit = (event) => { event.preventDefault(); storeKey(key.trim()); done(); };
  return html`
    <form class="key-form" onSubmit=${submit}>
      ${why && html`<p role="alert">${why}</p>`}
      <label>${isAdmin ? "This needs an admin key" : "This server needs an API key"}. This tab keeps it until it is closed.
        <input type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} />
      </label>
      <button class="main" disabled=${!key.trim()}>Use key</button>
    </form>`;
}

render(html`<${App} />`, document.getElementById("app"));
