// The heat maps of a reply: of the one canvas that is named above them. Knows traces and which canvas
// is looked at, and no messages.

import { button, el } from './dom.js';
import { HeatMap } from './heatmap.js';
import { isMarker, printable } from './tokens.js';

/** A token in a cell; a marker, which no reader sees, as a dot. */
const inCell = (token) => (isMarker(token) ? '·' : token && printable(token));

export class Maps {
  #title = el('h4', {});
  #before;
  #after;
  #end = el('p', { class: 'dim' });
  #entropy;
  #changes;
  #canvas = 0;

  /** onPick(canvas, position, step); onCanvas(canvas): another one is to be shown; onBegin(). */
  constructor({ onPick, onCanvas, onBegin }) {
    const pick = (position, step) => onPick(this.#canvas, position, step);
    this.#before = button('‹', () => onCanvas(this.#canvas - 1), { 'aria-label': 'Canvas before' });
    this.#after = button('›', () => onCanvas(this.#canvas + 1), { 'aria-label': 'Canvas after' });
    this.#entropy = new HeatMap('Entropy', ['0', 'highest'],
      { onPick: pick, onScroll: (x) => this.#changes?.scrollTo(x) });
    this.#changes = new HeatMap('Step of the last change', ['first', 'last'],
      { onPick: pick, onScroll: (x) => this.#entropy.scrollTo(x) });
    this.element = el('div', { class: 'maps', hidden: true },
      el('header', {}, this.#title, this.#before, this.#after),
      this.#entropy.element, this.#changes.element, this.#end,
      el('p', { class: 'dim' }, 'Positions run across, steps run down. Click a cell to look into it, or ',
        button('begin with the first', onBegin, { class: 'link' }), '.'));
  }

  get isOpen() { return !this.element.hidden; }

  /** at: { position, step } looked at in this canvas, or null. */
  show(trace, canvas, at) {
    const data = trace.data[canvas];
    const drafts = data?.drafts ?? [];
    if (!this.isOpen || !drafts.length) return;
    this.#canvas = canvas;
    const count = trace.data.length;
    this.#title.textContent = `Canvas ${canvas + 1} of ${count}`;
    this.#before.hidden = this.#after.hidden = count < 2;
    this.#before.disabled = canvas === 0;
    this.#after.disabled = canvas === count - 1;
    const positions = drafts[0].ids.length;
    const length = data.settled?.ids.length ?? positions;
    const end = length < positions ? length : null;
    this.#end.hidden = end === null;
    this.#end.textContent = `The line marks the end of the reply: what follows position ${end} was not kept.`;
    const highest = Math.max(0.001, ...drafts.map((draft) => Math.max(...draft.entropy)));
    const map = {
      positions, steps: drafts.length, end, text: (p, d) => inCell(drafts[d].tokens[p]),
    };
    this.#entropy.show({ ...map, value: (p, d) => drafts[d].entropy[p] / highest }, at);
    this.#changes.show({ ...map, value: (p, d) => drafts[d].changed[p] / Math.max(1, drafts.length - 1) }, at);
  }
}
