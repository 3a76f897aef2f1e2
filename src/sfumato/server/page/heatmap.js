// A map of one canvas, positions across and steps down: of a number from 0 to 1 for each cell, with
// the cell's characters in it. Drawn on a canvas element as large as what can be seen of the map,
// which scrolls. Arrow keys move through it as a click does. Knows no tokens.

import { el } from './dom.js';

const ROW = 18; // pixels
const CHARACTER = 7, PADDING = 7, MOST_CHARACTERS = 8;
const FADED = 0.4; // how much of a cell is left after the end of the reply

export class HeatMap {
  #canvas;
  #scroller;
  #room = el('div', {}); // as large as the whole map
  #map = { positions: 0, steps: 0, value: () => 0, text: () => '', end: null };
  #at = null;
  #cell = 0; // width

  /** onPick(position, step): both counted from 0; onScroll(x): another map may follow. */
  constructor(title, legend, { onPick, onScroll }) {
    this.onPick = onPick;
    this.#canvas = el('canvas', {
      tabindex: 0, role: 'img', 'aria-label': `${title}. Arrow keys move, and show a position.`,
      on: { click: (event) => this.#click(event), keydown: (event) => this.#key(event) },
    });
    this.#room.append(this.#canvas);
    this.#scroller = el('div', {
      class: 'map',
      on: { scroll: () => { onScroll(this.#scroller.scrollLeft); this.draw(); } },
    }, this.#room);
    this.element = el('figure', { class: 'heat' },
      el('figcaption', {}, el('span', {}, title),
        el('span', { class: 'legend' }, legend[0], el('i', { class: 'ramp' }), legend[1])),
      this.#scroller);
    new ResizeObserver(() => this.draw()).observe(this.#scroller);
  }

  /**
   * map: { positions, steps, value(position, step) → 0 to 1, text(position, step), end: the position
   * at which the reply ended, or null }; at: { position, step } looked at, or null.
   */
  show(map, at) {
    this.#map = map;
    const moved = at && (at.position !== this.#at?.position || at.step !== this.#at?.step);
    this.#at = at;
    this.draw();
    if (moved) this.#reveal(at);
  }

  scrollTo(x) { if (this.#scroller.scrollLeft !== x) this.#scroller.scrollLeft = x; }

  draw() {
    const { positions, steps, text, end } = this.#map;
    const wide = this.#scroller.clientWidth;
    if (!wide || !positions || !steps) return;
    let longest = 1;
    for (let p = 0; p < positions; p++) longest = Math.max(longest, [...text(p, steps - 1)].length);
    const characters = Math.min(MOST_CHARACTERS, longest);
    this.#cell = Math.max(characters * CHARACTER + PADDING, wide / positions);
    const width = Math.round(this.#cell * positions);
    this.#room.style.width = `${width}px`;
    this.#room.style.height = `${ROW * steps}px`;
    const high = Math.min(ROW * steps, this.#scroller.clientHeight);
    const scale = devicePixelRatio || 1;
    const seen = Math.min(wide, width);
    Object.assign(this.#canvas, { width: Math.round(seen * scale), height: Math.round(high * scale) });
    Object.assign(this.#canvas.style, { width: `${seen}px`, height: `${high}px` });
    const pen = this.#canvas.getContext('2d');
    pen.setTransform(scale, 0, 0, scale, -this.#scroller.scrollLeft * scale, -this.#scroller.scrollTop * scale);
    this.#cells(pen, seen, high, characters);
    const ink = getComputedStyle(this.element).getPropertyValue('--ink');
    if (end !== null) {
      pen.fillStyle = ink;
      pen.fillRect(end * this.#cell - 1.5, 0, 2, ROW * steps);
    }
    if (!this.#at) return;
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(this.#at.position * this.#cell + 0.75, this.#at.step * ROW + 0.75, this.#cell - 2.5, ROW - 2.5);
  }

  /** Those cells that can be seen. */
  #cells(pen, wide, high, characters) {
    const { positions, steps, value, text, end } = this.#map;
    const style = getComputedStyle(this.element);
    const [paper, accent, ink, onAccent] = ['--sunken', '--accent', '--ink', '--on-accent']
      .map((name) => style.getPropertyValue(name));
    const { scrollLeft, scrollTop } = this.#scroller;
    const cell = this.#cell;
    pen.font = `11px ${style.getPropertyValue('--mono')}`;
    Object.assign(pen, { textAlign: 'center', textBaseline: 'middle' });
    const last = Math.min(positions, Math.ceil((scrollLeft + wide) / cell));
    for (let s = Math.floor(scrollTop / ROW); s < Math.min(steps, Math.ceil((scrollTop + high) / ROW)); s++) {
      for (let p = Math.floor(scrollLeft / cell); p < last; p++) {
        const amount = Math.max(0, Math.min(1, value(p, s)));
        pen.globalAlpha = end !== null && p >= end ? FADED : 1;
        pen.fillStyle = `color-mix(in oklab, ${accent} ${Math.round(amount * 100)}%, ${paper})`;
        pen.fillRect(p * cell, s * ROW, cell - 1, ROW - 1);
        pen.fillStyle = amount > 0.55 ? onAccent : ink;
        pen.fillText([...text(p, s)].slice(0, characters).join(''), (p + 0.5) * cell - 0.5, (s + 0.5) * ROW);
      }
    }
    pen.globalAlpha = 1;
  }

  #reveal({ position, step }) {
    const box = this.#scroller;
    const into = (from, size, at, length) => Math.min(Math.max(from, at + length - size), at);
    box.scrollLeft = into(box.scrollLeft, box.clientWidth, position * this.#cell, this.#cell);
    box.scrollTop = into(box.scrollTop, box.clientHeight, step * ROW, ROW);
  }

  #click(event) {
    const box = this.#canvas.getBoundingClientRect();
    const x = event.clientX - box.left + this.#scroller.scrollLeft;
    const y = event.clientY - box.top + this.#scroller.scrollTop;
    this.#pick(Math.floor(x / this.#cell), Math.floor(y / ROW));
  }

  #key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const { position, step } = this.#at ?? { position: -move[0], step: this.#map.steps - 1 - move[1] };
    this.#pick(position + move[0], step + move[1]);
  }

  #pick(position, step) {
    const { positions, steps } = this.#map;
    if (!positions || !steps) return;
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.onPick(within(position, positions), within(step, steps));
  }
}
