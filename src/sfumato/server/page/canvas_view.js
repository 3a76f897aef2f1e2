// Draws tokens in place: one element per token, which stays the same while its text changes, on
// lines whose breaks hold still, in a box that never gets lower while it is held. Knows no drafts:
// it is given text and a style for each token.
//
// The text is monospaced and plain, white space kept: every cell of a canvas then has its place
// while it is still changing (boards, code and tables keep their columns), and what settles is
// exactly what was denoised.

import { el, isCalm } from './dom.js';
import { wrap } from './wrap.js';

const PROBE = '0'.repeat(40);
const MANY = 64; // blurring more elements at once than this makes pictures late without a GPU

export class CanvasView {
  #tokens = [];
  #spans = new Map();
  #breaks = null;
  #columns = 0;
  #rows = 0; // the most lines since the hold began
  #held = false;

  /** onPick(key) is called for the token that was clicked. */
  constructor(onPick, attributes = {}) {
    this.element = el('div', { class: 'canvas', 'aria-hidden': 'true', ...attributes });
    this.element.addEventListener('click', (event) => {
      const key = event.target.closest?.('.token')?.dataset.key;
      if (key && getSelection().isCollapsed) onPick(key);
    });
    new ResizeObserver(() => {
      if (this.element.offsetParent) this.#measure();
    }).observe(this.element);
  }

  /** tokens: [{ key, text, style }]; a key names a position for as long as the view lives. */
  draw(tokens, breaks = this.#breaks) {
    this.#tokens = tokens;
    // What is not shown has no width; to look for one at every draft would cost a layout each.
    if (!this.#columns && tokens.length && this.element.offsetParent) this.#measure(false);
    const wrapped = wrap(tokens.map((token) => token.text), this.#columns || 60, breaks);
    this.#breaks = wrapped.breaks;
    this.#rows = Math.max(this.#held ? this.#rows : 0, wrapped.lines.length);
    this.#place(wrapped.lines);
  }

  /** Lines that tokens would take, broken as now. */
  rowsFor(tokens) {
    return wrap(tokens.map((token) => token.text), this.#columns || 60, this.#breaks).lines.length;
  }

  get breaks() { return this.#breaks; }

  /** Characters that a line has room for; 0 while that is not known. */
  get columns() { return this.#columns; }

  /** From now on the box may grow and not shrink; `rows`: room for so many lines at once. */
  hold(rows = 0) {
    this.#held = true;
    this.#rows = Math.max(this.#rows, rows);
    this.draw(this.#tokens);
  }

  release() {
    this.#held = false;
    this.draw(this.#tokens);
  }

  /** Shows which token is looked at; null: none. */
  mark(key) {
    for (const span of this.#spans.values()) span.classList.toggle('picked', span.dataset.key === key);
  }

  #place(lines) {
    const rows = this.element.children;
    const seen = new Set();
    const fresh = [];
    lines.forEach((line, number) => {
      const row = rows[number] ?? this.element.appendChild(el('div', { class: 'line' }));
      const spans = line.map(({ piece, text }) => {
        const { key, style } = this.#tokens[piece];
        const name = seen.has(key) ? `${key}/${number}` : key; // a token may go over several lines
        seen.add(key).add(name);
        return this.#span(name, key, text, style, fresh);
      });
      if (spans.length !== row.childNodes.length || spans.some((s, i) => row.childNodes[i] !== s)) {
        row.replaceChildren(...spans);
      }
    });
    for (let n = lines.length; n < rows.length; n++) rows[n].replaceChildren();
    while (rows.length > this.#rows) rows[rows.length - 1].remove();
    while (rows.length < this.#rows) this.element.append(el('div', { class: 'line' }));
    for (const name of this.#spans.keys()) if (!seen.has(name)) this.#spans.delete(name);
    emerge(fresh);
  }

  #span(name, key, text, style, fresh) {
    let span = this.#spans.get(name);
    if (!span) {
      span = el('span', { 'data-key': key });
      this.#spans.set(name, span);
    }
    const picked = span.classList.contains('picked') ? ' picked' : '';
    const changed = span.textContent !== text;
    if (changed) span.textContent = text;
    if (changed && style.includes('glow-0')) fresh.push(span);
    const wanted = `token ${style}${picked}`;
    if (span.className !== wanted) span.className = wanted;
    return span;
  }

  #measure(redraw = true) {
    const probe = el('span', { class: 'probe' }, PROBE);
    this.element.append(probe);
    const cell = probe.getBoundingClientRect().width / PROBE.length;
    probe.remove();
    const columns = cell ? Math.max(8, Math.floor(this.element.clientWidth / cell)) : 0;
    if (!columns || columns === this.#columns) return;
    this.#columns = columns;
    this.#rows = 0;
    if (redraw) this.draw(this.#tokens, null);
  }
}

/** New characters come out of the haze. */
function emerge(spans) {
  if (isCalm()) return;
  const blur = spans.length <= MANY ? { filter: 'blur(5px)' } : {};
  const clear = spans.length <= MANY ? { filter: 'blur(0)' } : {};
  for (const span of spans) {
    span.animate([{ opacity: 0, ...blur }, { ...clear }], { duration: 420, easing: 'ease-out' });
  }
}
