// The bubble of one message. A reply denoises inside its bubble, and can be replayed, mapped and
// inspected there afterwards. Knows a record (the data that is kept) and its trace, no network.

import { CanvasView } from './canvas_view.js';
import { button, el } from './dom.js';
import { progress, summary } from './footer.js';
import { HeatMap } from './heatmap.js';
import { Scrubber } from './scrubber.js';
import { harmless, joinBytes, readTokens, START } from './tokens.js';
import { Trace } from './trace.js';

const HAZE = [0.05, 0.5, 1.5]; // nats at which a position is drawn one shade hazier
const SAY_MS = 150;
const BOARD = /^(?:[^\n]*\n)?(?:[\d._] ?){3,9}(?:\n(?:[\d._] ?){3,9}){2,8}$/;

/** Whether a text is a board of digits, which is drawn larger. */
export const isBoard = (text) => BOARD.test(text.trim());

/** What the reader wrote. */
export function question(text) {
  const style = isBoard(text) ? 'bubble said board' : 'bubble said';
  return el('li', { class: 'turn user' },
    el('h3', { class: 'unseen' }, 'You'), el('div', { class: style }, harmless(text)));
}

export class ReplyView {
  #answer;
  #thought;
  #fold;
  #scrubber;
  #spoken = el('p', { class: 'unseen', 'aria-live': 'polite' });
  #note = el('p', { class: 'note', hidden: true });
  #stats = el('p', { class: 'stats' });
  #actions = el('div', { class: 'actions', hidden: true });
  #maps = el('div', { class: 'maps', hidden: true });
  #entropy;
  #changes;
  #unsaid = '';
  #saying = 0;
  #pending = 0;
  #live = false;
  #picked = null; // { canvas, position }
  #heldFor = null; // the widths for which there is room for every frame

  /** record: { content, thought, canvases, … }, see chat.js; board: draw it larger. */
  constructor(record, { board, onRetry, inspector }) {
    this.record = record;
    this.trace = new Trace(record.canvases);
    this.inspector = inspector;
    const pick = (key) => this.#pickKey(key);
    this.#answer = new CanvasView(pick, { class: board ? 'canvas board' : 'canvas' });
    this.#thought = new CanvasView(pick);
    this.#fold = el('details', { class: 'thought', hidden: true },
      el('summary', {}, 'Thought'), this.#thought.element);
    this.#scrubber = new Scrubber({
      onMove: (frame) => this.#draw(frame, true),
      onHold: () => this.#holdForReplay(),
      onRelease: () => { if (!this.#live) this.#release(); },
    });
    const at = (position, step) => this.#inspect(this.#mapped(), position, step);
    this.#entropy = new HeatMap('Entropy', ['0', 'highest'], at);
    this.#changes = new HeatMap('Step of the last change', ['first', 'last'], at);
    this.#maps.append(this.#entropy.element, this.#changes.element,
      el('p', { class: 'dim' }, 'Positions run across, steps run down. Click a cell to look into it, or ',
        button('begin with the first', () => this.#inspectFirst(), { class: 'link' }), '.'));
    this.mapsButton = button('Heat maps', () => this.#toggleMaps(), { 'aria-expanded': 'false' });
    this.#actions.append(this.mapsButton,
      ...navigator.clipboard ? [button('Copy', (event) => copy(event.target, record.content))] : [],
      button('Retry', onRetry, { class: 'quiet retry' }));
    this.element = el('li', { class: 'turn reply' },
      el('h3', { class: 'unseen' }, 'Sfumato'),
      el('div', { class: 'bubble' }, this.#fold, this.#answer.element, this.#spoken, this.#note,
        this.#scrubber.element, this.#maps,
        el('div', { class: 'foot' }, this.#stats, this.#actions)));
  }

  /** The reply begins. */
  begin(thinking) {
    this.#live = true;
    this.#fold.hidden = !thinking;
    this.element.classList.add('live', 'waiting');
    this.#answer.hold(1);
    this.#thought.hold();
    this.#tell(['waiting for the first draft']);
  }

  /** Takes in a draft; it is drawn with the next picture of the screen. */
  draft(frame) {
    this.trace.draft(frame);
    this.element.classList.remove('waiting');
    const { drafts, maxSteps } = this.trace.data[frame.canvas];
    this.#tell(progress(frame.canvas, drafts, maxSteps));
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
    this.#saying = setTimeout(() => this.#say(), SAY_MS);
  }

  #say() {
    clearTimeout(this.#saying);
    if (this.#unsaid) this.#spoken.append(this.#unsaid);
    this.#unsaid = '';
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
    this.#scrubber.load(this.trace.frames(), this.trace.data.length);
    this.#draw(null);
    this.#fold.hidden = !record.thought;
    this.#release();
    this.#tell(summary(record));
    this.#actions.hidden = false;
    const note = record.error ?? (record.warnings ?? []).join(' ');
    this.#note.textContent = note;
    this.#note.hidden = !note;
    this.#note.setAttribute('role', record.error ? 'alert' : 'note');
  }

  /** Scrubs by some steps. */
  shift(by) { this.#scrubber.shift(by); }

  #tell(fields) { this.#stats.replaceChildren(...fields.map((field) => el('span', {}, field))); }

  #soon(frame) {
    cancelAnimationFrame(this.#pending);
    this.#pending = requestAnimationFrame(() => this.#draw(frame));
  }

  #draw(frame, replaying = false) {
    const { answer, thought } = this.#tokensAt(frame);
    if (thought.length) this.#fold.hidden = false;
    this.#thought.draw(thought);
    this.#answer.draw(answer);
    if (this.#picked && replaying) {
      const { canvas, position } = this.#picked;
      const draft = frame?.canvas === canvas ? frame.draft : this.trace.data[canvas].drafts.length - 1;
      this.#inspect(canvas, position, draft, false);
    }
    this.#drawMaps();
  }

  /** Tokens of answer and thought as they stood at a frame (null: at the end). */
  #tokensAt(frame) {
    const shown = { answer: [], thought: [] };
    let state = START;
    const last = frame ? frame.canvas : this.trace.data.length - 1;
    for (let c = 0; c <= last; c++) {
      const { drafts, settled } = this.trace.data[c];
      const d = frame && c === last ? frame.draft : drafts.length - 1;
      const drafting = (frame && c === last) || !settled;
      const draft = drafts[d];
      const tokens = drafting ? draft?.tokens ?? [] : settled.tokens;
      const read = readTokens(tokens, state);
      state = read.state;
      joinBytes(tokens).forEach((text, p) => {
        const kind = read.kinds[p];
        if (!kind) return;
        const style = drafting ? this.#style(c, p, d) : kind === 'call' ? 'call' : '';
        shown[kind === 'thought' ? 'thought' : 'answer'].push({ key: `${c}.${p}`, text: harmless(text), style });
      });
    }
    if (!frame && !this.#live && !this.#agrees(shown.answer)) {
      shown.answer = [{ key: '', text: harmless(this.record.content), style: '' }];
    }
    return shown;
  }

  /** Whether the tokens say what the server said: a stop string, for one, is in tokens alone. */
  #agrees(tokens) {
    if (this.record.stopped || this.record.error) return tokens.length > 0;
    const said = tokens.filter((token) => token.style !== 'call').map((token) => token.text).join('');
    return said.trim() === harmless(this.record.content).trim();
  }

  #style(c, p, d) {
    const draft = this.trace.data[c].drafts[d];
    const age = this.trace.age(c, p, d);
    const shade = HAZE.filter((nats) => draft.entropy[p] > nats).length;
    const haze = draft.accepted[p] ? Math.max(0, shade - 1) : Math.max(1, shade);
    return `haze-${haze}${age < 3 ? ` glow-${age}` : ''}`;
  }

  /** Room for the tallest frame: while it is replayed, a reply's height does not change. */
  #holdForReplay() {
    const columns = `${this.#answer.columns} ${this.#thought.columns}`;
    if (this.#heldFor === columns) return; // every frame is laid out below
    this.#heldFor = columns;
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
    this.#heldFor = null;
    this.#answer.release();
    this.#thought.release();
  }

  #toggleMaps() {
    this.#maps.hidden = !this.#maps.hidden;
    this.mapsButton.setAttribute('aria-expanded', String(!this.#maps.hidden));
    this.#drawMaps();
    this.#maps.scrollIntoView({ block: 'nearest' });
  }

  /** The canvas that the maps show: the one looked at. */
  #mapped() { return this.#scrubber.frame?.canvas ?? this.#picked?.canvas ?? this.trace.data.length - 1; }

  #drawMaps() {
    const c = this.#mapped();
    const drafts = this.trace.data[c]?.drafts ?? [];
    if (this.#maps.hidden || !drafts.length) return;
    const frame = this.#scrubber.frame;
    const at = this.#picked?.canvas === c
      ? { position: this.#picked.position, step: frame?.canvas === c ? frame.draft : drafts.length - 1 } : null;
    const highest = Math.max(0.001, ...drafts.flatMap((draft) => draft.entropy));
    const size = [drafts[0].ids.length, drafts.length];
    this.#entropy.show(...size, (p, d) => drafts[d].entropy[p] / highest, at);
    this.#changes.show(...size, (p, d) => drafts[d].changed[p] / Math.max(1, drafts.length - 1), at);
  }

  #pickKey(key) {
    const [canvas, position] = key.split('.').map(Number);
    if (this.#live || !this.trace.data[canvas]?.drafts.length) return;
    const frame = this.#scrubber.frame;
    const draft = frame?.canvas === canvas ? frame.draft : this.trace.data[canvas].drafts.length - 1;
    this.#inspect(canvas, position, draft, false);
    this.#drawMaps();
  }

  #inspectFirst() {
    const canvas = this.#mapped();
    const drafts = this.trace.data[canvas]?.drafts ?? [];
    if (!drafts.length) return;
    this.#inspect(canvas, 0, this.#scrubber.frame?.draft ?? drafts.length - 1, false);
    this.inspector.element.querySelector('button')?.focus();
  }

  /** Shows a position at a draft; `seek`: the replay goes there too. */
  #inspect(canvas, position, draft, seek = true) {
    this.#picked = { canvas, position };
    if (seek) { this.#holdForReplay(); this.#scrubber.seek(canvas, draft); return; }
    const key = `${canvas}.${position}`;
    this.#answer.mark(key);
    this.#thought.mark(key);
    this.inspector.show({ trace: this.trace, canvas, position, draft }, {
      onMove: (to, step) => this.#inspect(canvas, to, step),
      onClose: () => { this.#picked = null; this.#answer.mark(null); this.#thought.mark(null); this.#drawMaps(); },
    });
  }
}

async function copy(label, text) {
  await navigator.clipboard.writeText(text);
  label.textContent = 'Copied';
  setTimeout(() => { label.textContent = 'Copy'; }, 1500);
}
