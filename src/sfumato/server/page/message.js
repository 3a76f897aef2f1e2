// The bubble of a reply, which denoises inside it, and can be replayed, mapped,
// inspected and shared there afterwards; once it has settled, its Markdown is drawn. Knows a record
// (the data that is kept) and its trace, no network.

import { learn } from './api.js';
import { boardClass, isBoard, puzzleIn } from './board.js';
import { CanvasView } from './canvas_view.js';
import { button, el } from './dom.js';
import { progress, reading, remark, summary } from './footer.js';
import { legend } from './legend.js';
import { Maps } from './maps.js';
import { render } from './markdown.js';
import { drawFormulas } from './math.js';
import { NOISE, tokensAt } from './reading.js';
import { Scrubber } from './scrubber.js';
import { harmless } from './tokens.js';
import { Trace } from './trace.js';
import { canRecord } from './video.js';

const SAY_MS = 150;
const SAID_MS = 2000; // until what was read out is read out

export class ReplyView {
  #answer;
  #thought;
  #fold;
  #scrubber;
  #puzzle;
  #text = el('div', { class: 'markdown', hidden: true }); // settled text with its Markdown drawn
  #checkedText = ''; // the text that was last looked through for Markdown
  #isDrawn = false; // whether it had any
  #spokenText = ''; // of the answer, while it comes: what whole canvases have added
  #covered = 0; // settled canvases whose text that is
  #wantsText = null; // null: unless a token is underlined, which the canvas shows
  #spoken = el('p', { class: 'unseen', 'aria-live': 'polite' });
  #note = el('p', { class: 'note', hidden: true });
  #stoppedLabel = el('p', { class: 'stopped', hidden: true });
  #stats = el('p', { class: 'stats' });
  #bubble = el('div', { class: 'bubble' });
  #actions = el('div', { class: 'actions', hidden: true });
  #maps;
  #colours;
  #unsaid = '';
  #saying = 0;
  #pending = 0;
  #began = 0; // when the reply, and the drafts of its canvas, began: performance.now()
  #firstDraft = 0;
  #live = false;
  #frame = null; // what is drawn: a frame of the trace, or null for the end
  #picked = null; // { canvas, position }
  #mapped = null; // the canvas that the maps are of, where it was chosen
  #heldColumns = null; // the widths for which there is room for every frame

  /** record: { content, thought, canvases, … }, see chat.js; question: the text it replies to. */
  constructor(record, { question, onRetry, onSave, inspector, pace }) {
    this.record = record;
    this.trace = new Trace(record.canvases, record.model);
    for (const { drafts } of record.canvases) for (const { ids, tokens } of drafts) learn(ids, tokens, record.model);
    this.inspector = inspector;
    this.#puzzle = puzzleIn(question);
    const pick = (key) => this.#pickKey(key);
    const board = this.#puzzle ? ` ${boardClass(this.#puzzle)}` : isBoard(question) ? ' board' : '';
    this.#answer = new CanvasView(pick, { class: `canvas${board}` });
    if (this.#puzzle) this.#answer.element.style.setProperty('--size', this.#puzzle.size);
    this.#thought = new CanvasView(pick);
    this.#fold = el('details', { class: 'thought', hidden: true },
      el('summary', {}, 'Thought'), this.#thought.element);
    this.#scrubber = new Scrubber({
      pace,
      onMove: (frame) => { this.#mapped = null; this.#draw(frame, true); },
      onHold: () => this.#holdForReplay(),
      onRelease: () => { if (!this.#live) this.#release(); },
    });
    this.#maps = new Maps({
      onPick: (canvas, position, step) => this.#inspect(canvas, position, step),
      onCanvas: (canvas) => { this.#mapped = canvas; this.#drawMaps(); },
      onBegin: () => this.#inspectFirst(),
    });
    this.#colours = legend(Boolean(board));
    this.#addActions(onRetry, onSave);
    this.element = el('li', { class: 'turn reply' },
      el('h3', { class: 'unseen' }, 'Sfumato'),
      this.#bubble);
    this.#bubble.append(this.#stoppedLabel, this.#fold, this.#text, this.#answer.element, this.#spoken, this.#note,
      this.#scrubber.element, this.#colours.list, this.#maps.element, el('div', { class: 'foot' }, this.#stats, this.#actions));
  }

  #addActions(onRetry, onSave) {
    const toggle = (label, wanted) => button(label, () => this.#choose(wanted));
    this.forms = el('span', { class: 'forms', role: 'group', 'aria-label': 'Drawn as', hidden: true },
      toggle('Text', true), toggle('Canvas', false));
    this.mapsButton = button('Heat maps', () => this.#toggleMaps(), { 'aria-expanded': 'false' });
    this.shareButton = button('Save replay', (event) => onSave.page(this, event.target),
      { title: 'Save one HTML file that plays by itself, without a server' });
    this.videoButton = button('Save video', (event) => onSave.video(this, event.target),
      { title: 'Record the replay as a video file, of some seconds' });
    this.#actions.append(this.forms, this.#colours.button, this.mapsButton, this.shareButton, ...canRecord() ? [this.videoButton] : [],
      ...navigator.clipboard ? [button('Copy', (event) => copy(event.target, this.record.content))] : [],
      button('Retry', onRetry, { class: 'quiet retry' }));
  }

  /** The reply begins. */
  begin(thinking) {
    this.#live = true;
    this.#fold.hidden = !thinking;
    this.element.classList.add('live', 'waiting');
    this.#answer.hold(this.#puzzle?.size ?? 1);
    this.#thought.hold();
    this.#began = performance.now();
    this.#showStats(['waiting for the first draft']);
  }

  /** How far the prompt is encoded: llama-server's `prompt_progress`. */
  reads(prompt) {
    if (this.#live && !this.trace.data.length) this.#showStats(reading(prompt));
  }

  /** The noise that a canvas begins with. */
  noise(frame) {
    this.trace.begin(frame);
    this.element.classList.remove('waiting');
    this.#showStats([`canvas ${frame.canvas + 1}`, 'noise']);
    this.#soon({ canvas: frame.canvas, draft: NOISE });
  }

  /** Adds a draft, which is drawn with the next frame of the screen. */
  draft(frame) {
    learn(frame.token_ids, frame.tokens, this.record.model);
    this.trace.draft(frame);
    this.element.classList.remove('waiting');
    const { drafts, maxSteps } = this.trace.data[frame.canvas];
    if (drafts.length === 1) this.#firstDraft = performance.now();
    this.#showStats(progress(frame.canvas, drafts, maxSteps, this.#times()));
    this.#soon({ canvas: frame.canvas, draft: drafts.length - 1 });
  }

  /** A canvas has settled. */
  settle(frame) {
    this.trace.settle(frame);
    this.#soon(null);
  }

  /** Reads settled text out, to those who listen: a canvas at a time rather than word by word. */
  speak(text) {
    this.#unsaid += text;
    clearTimeout(this.#saying);
    this.#saying = setTimeout(() => { this.#say(); this.#soon(this.#frame); }, SAY_MS);
  }

  #say() {
    clearTimeout(this.#saying);
    if (this.#unsaid) this.#spoken.append(this.#unsaid);
    this.#spokenText += this.#unsaid;
    this.#unsaid = '';
    this.#covered = this.trace.data.filter((canvas) => canvas.settled).length;
  }

  /** The reply is over, or is shown again after a reload: from here on it is for looking at. */
  finish({ quietly = false } = {}) {
    cancelAnimationFrame(this.#pending);
    const { record } = this;
    this.#live = false;
    this.element.classList.remove('live', 'waiting');
    if (quietly) this.#spoken.removeAttribute('aria-live'); // nothing new to those who listen
    if (quietly) this.#unsaid = record.content;
    this.#say();
    const frames = this.trace.frames();
    this.#scrubber.load(frames, this.trace.data.length, record.stopped ? 'stopped' : undefined);
    this.#scrubber.element.hidden = this.#colours.button.hidden = this.mapsButton.hidden = this.shareButton.hidden = this.videoButton.hidden
      = Boolean(record.error) || !frames.length;
    this.#stoppedLabel.hidden = !record.stopped;
    this.#stoppedLabel.textContent = frames.length ? 'Stopped: a draft, and not the whole reply' : 'Stopped before the first draft';
    this.#bubble.style.minHeight = '';
    this.#draw(null);
    // Those who listen have the drawn text from now on, and not twice.
    if (this.#isDrawn) setTimeout(() => this.#spoken.remove(), quietly ? 0 : SAID_MS);
    this.#fold.hidden = !record.thought;
    this.#release();
    this.#showStats(summary(record));
    this.#actions.hidden = false;
    const note = record.error ?? remark(record);
    this.#note.textContent = note;
    this.#note.hidden = !note;
    this.#note.setAttribute('role', record.error ? 'alert' : 'note');
  }

  /** The tokens of the answer at a frame of the trace, null: at the end; see reading.js. */
  tokensAt(frame) { return this.#tokensAt(frame).answer; }

  /** Scrubs by some steps. */
  shift(by) { if (!this.#scrubber.element.hidden) this.#scrubber.shift(by); }

  /** Seconds of this canvas since its first draft; tokens of the canvases before it, and their seconds. */
  #times() {
    const tokens = this.trace.data.reduce((sum, { settled }) => sum + (settled?.ids.length ?? 0), 0);
    return { canvas: (performance.now() - this.#firstDraft) / 1000, tokens, before: (this.#firstDraft - this.#began) / 1000 };
  }

  #showStats(fields) { this.#stats.replaceChildren(...fields.map((field) => el('span', {}, field))); }

  #soon(frame) {
    cancelAnimationFrame(this.#pending);
    this.#pending = requestAnimationFrame(() => this.#draw(frame));
  }

  #draw(frame, replaying = false) {
    this.#frame = frame;
    const { answer, thought } = this.#tokensAt(frame);
    if (thought.length) this.#fold.hidden = false;
    this.#thought.draw(thought);
    const covered = this.#drawText(frame) && this.#live ? this.#covered : 0;
    this.#answer.draw(answer.filter((token) => token.canvas >= covered));
    this.#answer.element.hidden ||= !this.#live && !answer.some(({ text }) => text); // a board would be an empty frame
    if (this.#picked && replaying) {
      const { canvas, position } = this.#picked;
      this.#inspect(canvas, position, this.#draftOf(canvas), false);
    }
    this.#drawMaps();
  }

  /**
   * Draws the text that has settled, and says whether it is shown: where it has Markdown, unless the
   * canvas is asked for, replayed or looked into.
   */
  #drawText(frame) {
    const { content, stopped, error } = this.record;
    const text = this.#live ? this.#spokenText : stopped || error ? '' : content;
    const settled = this.#puzzle ? '' : text.trim();
    if (settled !== this.#checkedText) {
      this.#checkedText = settled;
      const elements = render(harmless(settled));
      if (elements && this.#live) this.#keepHeight();
      if (elements) this.#text.replaceChildren(elements);
      drawFormulas(this.#text);
      this.#isDrawn = elements !== null;
    }
    const wantsText = this.#wantsText ?? !this.trace.data.some(({ settled: one }) => one?.doubted);
    const isShown = this.#isDrawn && (this.#live || (wantsText && !frame && !this.#picked));
    this.#text.hidden = !isShown;
    this.#text.inert = this.#live;
    this.#answer.element.hidden = isShown && !this.#live;
    this.forms.hidden = !this.#isDrawn;
    this.forms.childNodes.forEach((one, i) => one.setAttribute('aria-pressed', String((i === 0) === isShown)));
    return isShown;
  }

  /** A canvas becomes text: the canvas after it begins afresh, and the bubble does not get lower. */
  #keepHeight() {
    this.#bubble.style.minHeight = `${this.#bubble.offsetHeight}px`;
    this.#answer.release();
    this.#answer.hold();
  }

  /** Text or canvas, of what has settled. */
  #choose(wantsText) {
    this.#wantsText = wantsText;
    this.inspector.close();
    this.#scrubber.end();
    this.#draw(null);
    this.#release();
  }

  /** Tokens of answer and thought as they stood at a frame (null: at the end). */
  #tokensAt(frame) {
    const shown = tokensAt(this.trace, frame, this.#puzzle);
    if (!frame && !this.#live && !this.#agrees(shown.answer)) {
      shown.answer = [{ key: '', canvas: 0, text: harmless(this.record.content), style: '' }];
    }
    return shown;
  }

  /** Whether the tokens say what the server said: a stop string, for one, is in tokens alone. */
  #agrees(tokens) {
    if (this.record.stopped || this.record.error) return tokens.length > 0;
    const said = tokens.filter((token) => token.style !== 'call').map((token) => token.text).join('');
    return said.trim() === harmless(this.record.content).trim();
  }

  /** Room for the tallest frame: while it is replayed, a reply's height does not change. */
  #holdForReplay() {
    this.#answer.element.hidden = false;
    const columns = `${this.#answer.columns} ${this.#thought.columns}`;
    if (this.#heldColumns === columns) return; // every frame is laid out below
    this.#heldColumns = columns;
    let answer = 0, thought = 0;
    for (const frame of this.trace.frames()) {
      const shown = this.#tokensAt(frame);
      answer = Math.max(answer, this.#answer.rowsFor(shown.answer));
      thought = Math.max(thought, this.#thought.rowsFor(shown.thought));
    }
    this.#answer.hold(answer);
    this.#thought.hold(thought);
  }

  #release() {
    this.#heldColumns = null;
    this.#answer.release();
    this.#thought.release();
  }

  #toggleMaps() {
    this.#maps.element.hidden = this.#maps.isOpen;
    this.mapsButton.setAttribute('aria-expanded', String(this.#maps.isOpen));
    this.#drawMaps();
    this.#maps.element.scrollIntoView({ block: 'nearest' });
  }

  /** The canvas that the maps show: the one chosen or looked at. */
  #canvasOfMaps() {
    return this.#mapped ?? this.#scrubber.frame?.canvas ?? this.#picked?.canvas ?? this.trace.data.length - 1;
  }

  /** The draft of a canvas that is looked at: its last, but where the replay stands in it. */
  #draftOf(canvas) {
    const frame = this.#scrubber.frame;
    return Math.max(0, frame?.canvas === canvas ? frame.draft : this.trace.data[canvas].drafts.length - 1);
  }

  #drawMaps() {
    if (!this.#maps.isOpen) return;
    const canvas = this.#canvasOfMaps();
    const at = this.#picked?.canvas === canvas
      ? { position: this.#picked.position, step: this.#draftOf(canvas) } : null;
    this.#maps.show(this.trace, canvas, at);
  }

  #pickKey(key) {
    const [canvas, position] = key.split('.').map(Number);
    if (this.#live || !this.trace.data[canvas]?.drafts.length) return;
    this.#mapped = null;
    this.#inspect(canvas, position, this.#draftOf(canvas), false);
    this.#drawMaps();
  }

  #inspectFirst() {
    const canvas = this.#canvasOfMaps();
    if (!this.trace.data[canvas]?.drafts.length) return;
    this.#inspect(canvas, 0, this.#draftOf(canvas), false);
    this.inspector.element.querySelector('button')?.focus();
  }

  /** Shows a position at a draft; `seek`: the replay goes there too. */
  #inspect(canvas, position, draft, seek = true) {
    this.#picked = { canvas, position };
    if (seek) { this.#holdForReplay(); this.#scrubber.seek(canvas, draft); return; }
    const key = `${canvas}.${position}`;
    if (!this.#text.hidden) this.#draw(this.#frame);
    this.#answer.mark(key);
    this.#thought.mark(key);
    this.inspector.show({ trace: this.trace, canvas, position, draft }, {
      onMove: (to, step) => this.#inspect(canvas, to, step),
      onClose: () => {
        this.#picked = null;
        this.#answer.mark(null);
        this.#thought.mark(null);
        this.#draw(this.#frame);
      },
    });
  }
}

async function copy(label, text) {
  await navigator.clipboard.writeText(text);
  label.textContent = 'Copied';
  setTimeout(() => { label.textContent = 'Copy'; }, 1500);
}
