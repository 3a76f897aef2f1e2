// Where a text forms: its canvas, the slider that replays it, and what is to be said of it. Knows
// traces, and neither the server nor what was asked.

import { boardClass } from '../board.js';
import { CanvasView } from '../canvas_view.js';
import { el } from '../dom.js';
import { legend } from '../legend.js';
import { progress } from '../footer.js';
import { NOISE, tokensAt } from '../reading.js';
import { Scrubber } from '../scrubber.js';
import { Trace } from '../trace.js';

export class Stage {
  #trace = new Trace();
  #how = { puzzle: null, dress: (tokens) => tokens };
  #canvas;
  #scrubber;
  #final = null; // tokens of the end, where they are not those of the trace
  #pending = 0;
  #hint;
  #note = el('p', { class: 'note', role: 'note', hidden: true });
  #stats = el('p', { class: 'stats' });
  #spoken = el('p', { class: 'unseen', 'aria-live': 'polite' });
  #bubble = el('div', { class: 'bubble' }); // stands on the page from the first run on
  #extra = el('div', { class: 'extra' });

  /** hint: what is said before the first run; pace(): milliseconds that a frame of a replay is held. */
  constructor(element, { hint, pace }) {
    this.element = element;
    this.#hint = el('p', { class: 'dim before' }, hint);
    this.#canvas = new CanvasView(() => {});
    this.#scrubber = new Scrubber({
      pace,
      onMove: (frame) => this.#draw(frame),
      onHold: () => this.#hold(),
      onRelease: () => this.#canvas.release(),
    });
    const colours = legend();
    this.#bubble.append(this.#canvas.element, this.#scrubber.element, this.#note, this.#extra, colours.list,
      el('div', { class: 'foot' }, this.#stats, el('div', { class: 'actions' }, colours.button)));
    element.append(this.#hint, this.#spoken);
  }

  /** A run begins. puzzle: see board.js; dress(tokens): the tokens of a frame as they are to be drawn. */
  begin({ puzzle = null, dress = (tokens) => tokens } = {}) {
    this.#how = { puzzle, dress };
    this.#trace = new Trace();
    this.#final = null;
    const canvas = new CanvasView(() => {}, { class: puzzle ? `canvas ${boardClass(puzzle)}` : 'canvas' });
    if (puzzle) canvas.element.style.setProperty('--size', puzzle.size);
    this.#canvas.element.replaceWith(canvas.element);
    this.#canvas = canvas;
    this.#hint.hidden = this.#note.hidden = true;
    this.element.classList.add('reply');
    this.#spoken.before(this.#bubble);
    this.#extra.replaceChildren();
    this.#spoken.textContent = '';
    this.#scrubber.load([], 0);
    this.element.classList.add('live', 'waiting');
    canvas.hold(puzzle?.size ?? 1);
    this.#say(['waiting for the first draft']);
    this.element.scrollIntoView({ block: 'nearest' });
  }

  noise(frame) {
    this.#trace.begin(frame);
    this.element.classList.remove('waiting');
    this.#say([`canvas ${frame.canvas + 1}`, 'noise']);
    this.#soon({ canvas: frame.canvas, draft: NOISE });
  }

  draft(frame) {
    this.#trace.draft(frame);
    this.element.classList.remove('waiting');
    const { drafts, maxSteps } = this.#trace.data[frame.canvas];
    this.#say(progress(frame.canvas, drafts, maxSteps));
    this.#soon({ canvas: frame.canvas, draft: drafts.length - 1 });
  }

  settle(frame) {
    this.#trace.settle(frame);
    this.#soon(null);
  }

  /**
   * A run is over. text: for those who listen; final: the tokens to draw, those of the trace where none
   * are given; note, stats: in words; extra: elements below the canvas.
   */
  end({ text = '', final = null, note = '', stats, extra = [] }) {
    cancelAnimationFrame(this.#pending);
    this.element.classList.remove('live', 'waiting');
    this.#final = final;
    const frames = this.#trace.frames();
    this.#scrubber.load(frames, this.#trace.data.length);
    this.#scrubber.element.hidden = !frames.length;
    this.#bubble.hidden = !frames.length && !final;
    this.#hint.hidden = !this.#bubble.hidden;
    this.#draw(null);
    this.#canvas.release();
    this.#note.textContent = note;
    this.#note.hidden = !note;
    this.#extra.replaceChildren(...extra);
    this.#spoken.textContent = text;
    this.#say(stats);
  }

  #say(fields) { this.#stats.replaceChildren(...fields.map((field) => el('span', {}, field))); }

  #soon(frame) {
    cancelAnimationFrame(this.#pending);
    this.#pending = requestAnimationFrame(() => this.#draw(frame));
  }

  #draw(frame) { this.#canvas.draw(this.#tokensAt(frame)); }

  #tokensAt(frame) {
    if (!frame && this.#final) return this.#final;
    return this.#how.dress(this.#textAt(frame));
  }

  #textAt(frame) { return tokensAt(this.#trace, frame, this.#how.puzzle).answer; }

  /** Room for the tallest frame while it is replayed. */
  #hold() {
    const rows = this.#trace.frames().map((frame) => this.#canvas.rowsFor(this.#textAt(frame)));
    this.#canvas.hold(Math.max(this.#canvas.rowsFor(this.#tokensAt(null)), ...rows));
  }
}
