// The conversation: sends a question, feeds the reply's frames to its bubble, stops and retries.
// Knows the order of things; how they look is message.js's, how they travel api.js's.

import { complete } from './api.js';
import { ServerError } from './errors.js';
import { ReplyView } from './message.js';
import { drawSeed, paced } from './pace.js';
import { contentOf } from './pictures.js';
import { question } from './question.js';
import { share } from './share.js';
import { loadTurns, saveTurns } from './store.js';

export class Chat {
  #turns = loadTurns(); // [{ role: 'user', content, pictures } | { role: 'assistant', content, … }]
  #views = []; // one for each turn; null for a question
  #running = null; // AbortController of the reply that is on its way
  #cleared = null; // what `clear` took away: { turns, views, shown }, while it can come back

  /** What the server says of its model: { model, version, demonstration }, see /props. */
  about = {};

  /** list: the element for the turns; onState() is called when what can be done has changed. */
  constructor(list, { settings, inspector, onState }) {
    Object.assign(this, { list, settings, inspector, onState });
    for (const turn of this.#turns) {
      // What was left in the middle of a reply is as far as it came.
      if (turn.role === 'assistant' && !turn.finish && !turn.error) turn.stopped = true;
      this.#show(turn)?.finish({ quietly: true });
    }
    addEventListener('pagehide', () => saveTurns(this.#turns));
  }

  get isRunning() { return this.#running !== null; }

  get isEmpty() { return this.#turns.length === 0; }

  /** The bubble of the last reply, if there is one. */
  get last() { return this.#views.at(-1) ?? null; }

  /** Asks, and shows the reply as it forms. pictures: as pictures.js makes them. */
  async send(text, pictures = []) {
    if (this.isRunning || !(text.trim() || pictures.length)) return;
    this.#add({ role: 'user', content: text, pictures });
    await this.#reply();
  }

  stop() { this.#running?.abort(); }

  /** The last question once more. */
  async retry() {
    if (this.isRunning || this.#turns.at(-1)?.role !== 'assistant') return;
    this.inspector.close();
    this.#turns.pop();
    this.#views.pop().element.remove();
    await this.#reply();
  }

  /** Begins anew; the conversation can come back until the next one has a turn. */
  clear() {
    this.stop();
    this.inspector.close();
    this.#cleared = { turns: this.#turns, views: this.#views, shown: [...this.list.children] };
    this.#hold([], [], []);
  }

  /** Whether `undo` brings a conversation back. */
  get canUndo() { return this.#cleared !== null; }

  /** Brings the conversation back that `clear` took away. */
  undo() {
    if (!this.#cleared) return;
    const { turns, views, shown } = this.#cleared;
    this.#cleared = null;
    this.#hold(turns, views, shown);
  }

  #hold(turns, views, shown) {
    this.#turns = turns;
    this.#views = views;
    this.list.replaceChildren(...shown);
    saveTurns(turns);
    this.onState();
  }

  async #reply() {
    const { system } = this.settings;
    const messages = [...system ? [{ role: 'system', content: system }] : [], ...history(this.#turns)];
    const fields = this.settings.requestFields;
    fields.seed ??= drawSeed();
    const record = { role: 'assistant', content: '', thought: '', canvases: [], seed: fields.seed };
    const view = this.#add(record);
    const running = new AbortController();
    this.#running = running;
    this.onState();
    view.begin(this.settings.values.thinking);
    try {
      await this.#follow(complete({ messages, ...fields }, running.signal), view, running.signal);
    } catch (error) {
      if (running.signal.aborted) record.stopped = true;
      else if (error instanceof ServerError) record.error = error.message;
      else { record.error = 'The connection broke off.'; console.warn(error); }
    }
    this.#running = null;
    this.#keep(() => view.finish());
    if (this.#turns.includes(record)) saveTurns(this.#turns);
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
      if (frame.timings) record.timings = frame.timings;
      if (frame.warnings) record.warnings = frame.warnings;
    }
  }

  #add(turn) {
    this.#cleared = null;
    this.#turns.push(turn);
    let view;
    this.#keep(() => { view = this.#show(turn); }, true);
    saveTurns(this.#turns);
    return view;
  }

  #show(turn) {
    if (turn.role === 'user') {
      this.list.append(question(turn.content, turn.pictures));
      this.#views.push(null);
      return null;
    }
    const asked = this.#turns[this.#turns.indexOf(turn) - 1] ?? { content: '' };
    const view = new ReplyView(turn, {
      question: asked.content, inspector: this.inspector, onRetry: () => this.retry(),
      onShare: (view, label) => share(view, asked, this.about, label),
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
    const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 80;
    change();
    if (atEnd || follow) requestAnimationFrame(() => page.scrollTo({ top: page.scrollHeight }));
  }
}

/** The messages of the request: questions with their replies, without those that have no reply. */
function history(turns) {
  const messages = [];
  turns.forEach(({ role, content, pictures }, i) => {
    const answer = turns[i + 1];
    if (role === 'assistant' ? content : !answer || answer.content) messages.push({ role, content: contentOf(content, pictures) });
  });
  return messages;
}
