// One position of a canvas at one step: the most probable tokens, its entropy, and where the token
// that it settled to stood at every step. A panel beside the conversation. Knows traces, and no
// messages: its caller names the position, and hears which one the reader chooses next.

import { nameOf } from './api.js';
import { button, el } from './dom.js';
import { printable } from './tokens.js';

const SHOWN = 5; // of the most probable tokens, and the settled token in any case
const percent = (p) => (p === null ? '–' : `${p >= 0.0995 ? (p * 100).toFixed(0) : (p * 100).toFixed(1)} %`);

export class Inspector {
  #place = null;
  #body = el('div', { class: 'inspected' });

  constructor(element) {
    this.element = element;
    element.append(
      el('header', {}, el('h2', {}, 'Position'),
        button('‹', () => this.#move(-1), { 'aria-label': 'Position before' }),
        button('›', () => this.#move(1), { 'aria-label': 'Position after' }),
        button('✕', () => this.close(), { 'aria-label': 'Close the inspector' })),
      this.#body);
    element.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { event.stopPropagation(); this.close(); }
      else if (event.key === 'ArrowLeft') { event.preventDefault(); event.stopPropagation(); this.#move(-1); }
      else if (event.key === 'ArrowRight') { event.preventDefault(); event.stopPropagation(); this.#move(1); }
    });
  }

  get place() { return this.element.hidden ? null : this.#place; }

  /** place: { trace, canvas, position, draft }; onMove(position, draft) and onClose() call back. */
  show(place, { onMove, onClose }) {
    if (this.#place && this.#place.trace !== place.trace) this.onClose?.();
    Object.assign(this, { onMove, onClose });
    this.#place = place;
    this.element.hidden = false;
    document.body.classList.add('inspecting');
    this.#draw();
  }

  close() {
    if (this.element.hidden) return;
    this.element.hidden = true;
    document.body.classList.remove('inspecting');
    this.#place = null;
    this.onClose?.();
  }

  #move(by) {
    const { trace, canvas, position, draft } = this.#place;
    const to = position + by;
    if (to >= 0 && to < trace.data[canvas].drafts[draft].ids.length) this.onMove(to, draft);
  }

  #draw() {
    const { trace, canvas, position, draft } = this.#place;
    const { drafts } = trace.data[canvas];
    const now = drafts[draft];
    const settled = trace.settledAt(canvas, position);
    this.#body.replaceChildren(
      el('p', { class: 'dim' }, `canvas ${canvas + 1} · position ${position + 1} · step ${now.step}`),
      el('dl', {},
        el('dt', {}, 'settled to'), el('dd', { class: 'mono' }, printable(settled.text)),
        el('dt', {}, 'here now'), el('dd', { class: 'mono' }, printable(now.tokens[position])),
        el('dt', {}, 'entropy'), el('dd', {}, `${now.entropy[position].toFixed(3)} nats`),
        el('dt', {}, 'accepted'), el('dd', {}, now.accepted[position] ? 'yes' : 'no'),
        el('dt', {}, 'last changed'), el('dd', {}, `at step ${trace.changedStep(canvas, position, draft)}`)),
      el('h3', {}, 'Most probable'),
      this.#mostProbable(now.top.at(position), settled.id, trace.model),
      el('h3', {}, 'The settled token, step by step'),
      this.#history(trace, canvas, position, draft));
  }

  #mostProbable(kept, settledId, model) {
    const shown = kept.filter(([id], rank) => rank < SHOWN || id === settledId);
    if (!shown.length) return el('p', { class: 'dim' }, 'Not kept for this reply.');
    return el('ol', { class: 'most-probable' }, ...shown.map(([id, p]) => {
      const name = el('span', { class: 'mono' }, '…');
      nameOf(id, model).then((text) => { name.textContent = printable(text); }, () => { name.textContent = `#${id}`; });
      const bar = el('i', { class: 'bar' });
      bar.style.width = `${Math.max(1, p * 100)}%`;
      return el('li', { class: id === settledId ? 'settled' : '' },
        name, el('span', { class: 'track' }, bar), el('span', { class: 'number' }, percent(p)));
    }));
  }

  #history(trace, canvas, position, draft) {
    return el('ol', { class: 'history' }, ...trace.data[canvas].drafts.map((one, d) => {
      const { rank, p } = trace.standing(canvas, position, d);
      const place = rank ? `${rank}. most probable, ${percent(p)}` : 'not among the most probable';
      const label = `Step ${one.step}: ${place}`;
      const bar = el('i', { class: 'bar' });
      bar.style.height = `${Math.max(2, (p ?? 0) * 100)}%`;
      return el('li', {}, el('button', {
        type: 'button', 'aria-label': label, title: label, 'aria-current': d === draft ? 'step' : false,
        on: { click: () => this.onMove(position, d) },
      }, el('span', { class: 'track' }, bar), el('span', { class: 'rank' }, rank ? `${rank}.` : '–')));
    }));
  }
}
