// The conversation that is shown: sends a question, feeds the reply's frames to its bubble, stops, retries,
// and goes back to an earlier question. Knows the order of things; how they look is message.js's, how they
// travel api.js's, where they are kept store.js's.

import { chosenModel, complete } from './api.js';
import { newId } from './dom.js';
import { makeEditable } from './editing.js';
import { ServerError } from './errors.js';
import { doubtsOf } from './footer.js';
import { ReplyView } from './message.js';
import { drawSeed, paced } from './pace.js';
import { contentOf } from './pictures.js';
import { question } from './question.js';
import { saveReplay, saveVideo } from './share.js';
import { loadConversation, loadCurrent, saveConversation, saveCurrent } from './store.js';
import { withFiles } from './text_files.js';

const LONGEST_TITLE = 60;

/** What a conversation is called: as a person named it, or by its first question. */
export function titleOf({ title, turns }) {
  const asked = turns.find(({ role }) => role === 'user');
  const text = title || asked?.content.trim().split('\n')[0] || asked?.files?.[0]?.name || 'Pictures';
  const letters = [...text];
  return letters.length > LONGEST_TITLE ? `${letters.slice(0, LONGEST_TITLE - 1).join('')}…` : text;
}

export class Chat {
  // [{ role: 'user', content, pictures, files } | { role: 'assistant', content, … }]
  #talk = { id: newId(), title: '', turns: [] };
  #views = []; // one for each turn; null for a question
  #running = null; // AbortController of the reply that is on its way
  #before = null; // what an edit replaced: { turns, views, shown }, while it can come back
  #isFull = false; // the last time, there was no room to keep the conversation

  /** What the server says of its model: { model, version, demonstration }, see /props. */
  about = {};

  /** list: the element for the turns; onState() is called when what can be done has changed. */
  constructor(list, { settings, inspector, onState }) {
    Object.assign(this, { list, settings, inspector, onState });
    this.#take(loadConversation(loadCurrent()));
    addEventListener('pagehide', () => this.save());
  }

  get #turns() { return this.#talk.turns; }

  get id() { return this.#talk.id; }

  get isRunning() { return this.#running !== null; }

  get isEmpty() { return this.#turns.length === 0; }

  /** Whether the browser has no room for the conversation, which a reload would lose. */
  get isFull() { return this.#isFull; }

  /** The bubble of the last reply, if there is one. */
  get last() { return this.#views.at(-1) ?? null; }

  /** Asks, and shows the reply as it forms. pictures: as pictures.js makes them; files: as text_files.js does. */
  async send(text, { pictures = [], files = [] } = {}) {
    if (this.isRunning || !(text.trim() || pictures.length || files.length)) return;
    this.#before = null;
    this.#add({ role: 'user', content: text, pictures, files });
    await this.#reply();
  }

  stop() { this.#running?.abort(); }

  /** The last question once more. */
  async retry() {
    if (this.isRunning || this.#turns.at(-1)?.role !== 'assistant') return;
    this.#cutTo(this.#turns.length - 1);
    await this.#reply();
  }

  /** Another text for an earlier question; what came after it can come back until the next question. */
  async edit(turn, content) {
    const at = this.#turns.indexOf(turn);
    if (this.isRunning || at < 0) return;
    this.#cutTo(at);
    this.#add({ ...turn, content });
    await this.#reply();
  }

  /** Removes the turns from one on; `undo` brings them back. */
  #cutTo(at) {
    this.inspector.close();
    const shown = [...this.list.children];
    this.#before = { turns: this.#turns, views: this.#views, shown };
    this.#hold(this.#turns.slice(0, at), this.#views.slice(0, at), shown.slice(0, at));
  }

  /** Whether `undo` brings turns back. */
  get canUndo() { return this.#before !== null; }

  /** Brings the turns back that an edit or a retry took away. */
  undo() {
    if (!this.#before) return;
    const { turns, views, shown } = this.#before;
    this.stop();
    this.inspector.close();
    this.#before = null;
    this.#hold(turns, views, shown);
    this.save();
  }

  #hold(turns, views, shown) {
    this.#talk.turns = turns;
    this.#views = views;
    this.list.replaceChildren(...shown);
    this.onState();
  }

  /** Begins another conversation; this one is kept. */
  clear() {
    this.save();
    this.leave();
  }

  /** Begins another conversation, and leaves this one as it is kept. */
  leave() {
    this.stop();
    this.#take(null);
    saveCurrent(this.id);
    this.onState();
  }

  /** Shows another conversation, which is kept. */
  open(id) {
    const found = loadConversation(id);
    if (!found || (id === this.id && !this.isEmpty)) return;
    this.save();
    this.stop();
    this.#take(found);
    saveCurrent(id);
    this.onState();
    requestAnimationFrame(() => document.scrollingElement.scrollTo({ top: document.scrollingElement.scrollHeight }));
  }

  /** The title of a conversation is another one. */
  renamed(id, title) { if (id === this.id) this.#talk.title = title; }

  /** Keeps the conversation; called wherever it has changed. */
  save(talk = this.#talk) {
    if (talk.turns.length) this.#isFull = !saveConversation({ ...talk, changed: talk.changed ?? Date.now() });
  }

  /** Shows a conversation as it was kept; null: an empty one. */
  #take(found) {
    this.inspector.close();
    this.#before = null;
    this.#talk = found ?? { id: newId(), title: '', turns: [] };
    this.#views = [];
    this.#isFull = false;
    this.list.replaceChildren();
    for (const turn of this.#turns) {
      // What was left in the middle of a reply is as far as it came.
      if (turn.role === 'assistant' && !turn.finish && !turn.error) turn.stopped = true;
      this.#show(turn)?.finish({ quietly: true });
    }
  }

  async #reply() {
    const { system } = this.settings;
    const messages = [...system ? [{ role: 'system', content: system }] : [], ...history(this.#turns)];
    const fields = this.settings.requestFields;
    fields.seed ??= drawSeed();
    const record = { role: 'assistant', content: '', thought: '', canvases: [], seed: fields.seed, model: chosenModel() };
    const view = this.#add(record);
    const running = new AbortController(), talk = this.#talk;
    this.#running = running;
    this.onState();
    view.begin(this.settings.values.thinking);
    try {
      await this.#follow(complete({ messages, return_progress: true, ...fields }, running.signal), view, running.signal);
    } catch (error) {
      if (running.signal.aborted) record.stopped = true;
      else if (error instanceof ServerError) record.error = error.message;
      else { record.error = 'The connection broke off.'; console.warn(error); }
    }
    if (this.#running === running) this.#running = null;
    this.#keep(() => view.finish());
    if (talk.turns.includes(record) && talk === this.#talk) this.#changed();
    this.onState();
  }

  async #follow(frames, view, signal) {
    const { record } = view;
    const change = (step) => this.#keep(step);
    for await (const frame of paced(frames, view, this.settings, signal, change)) {
      const choice = frame.choices?.[0];
      if (choice?.delta?.content) { record.content += choice.delta.content; view.speak(choice.delta.content); }
      if (choice?.delta?.reasoning_content) record.thought += choice.delta.reasoning_content;
      if (choice?.finish_reason) record.finish = choice.finish_reason;
      if (choice?.verification) record.doubts = doubtsOf(choice.verification).slice(0, 2_000);
      if (frame.prompt_progress) view.reads(frame.prompt_progress);
      if (frame.timings) record.timings = frame.timings;
      if (frame.warnings) record.warnings = frame.warnings;
    }
  }

  #add(turn) {
    this.#turns.push(turn);
    let view;
    this.#keep(() => { view = this.#show(turn); }, true);
    this.#changed();
    return view;
  }

  #changed() {
    this.#talk.changed = Date.now();
    saveCurrent(this.id);
    this.save();
  }

  #show(turn) {
    if (turn.role === 'user') {
      const element = question(turn.content, turn.pictures, turn.files);
      makeEditable(element, turn.content, {
        canEdit: () => !this.isRunning, onSend: (text) => this.edit(turn, text),
      });
      this.list.append(element);
      this.#views.push(null);
      return null;
    }
    const asked = this.#turns[this.#turns.indexOf(turn) - 1] ?? { content: '' };
    const view = new ReplyView(turn, {
      question: asked.content, inspector: this.inspector, onRetry: () => this.retry(),
      onSave: {
        page: (view, label) => saveReplay(view, asked, this.about, label),
        video: (view, label) => saveVideo(view, asked, this.about, label),
      },
      pace: () => this.settings.pace.replay,
    });
    turn.canvases = view.trace.data;
    this.#views.push(view);
    this.list.append(view.element);
    return view;
  }

  /** Makes a change that may lengthen the page; a page that showed its end still shows it after. */
  #keep(change, follow = false) {
    const page = document.scrollingElement;
    if (!this.list.offsetParent) { change(); return; } // another view is shown
    const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 80;
    change();
    if (atEnd || follow) requestAnimationFrame(() => page.scrollTo({ top: page.scrollHeight }));
  }
}

/** The messages of the request: questions with their replies, without those that have no reply. */
function history(turns) {
  const messages = [];
  turns.forEach(({ role, content, pictures, files }, i) => {
    const answer = turns[i + 1];
    const isSent = role === 'assistant' ? content : !answer || answer.content;
    if (isSent) messages.push({ role, content: contentOf(withFiles(content, files), pictures) });
  });
  return messages;
}
