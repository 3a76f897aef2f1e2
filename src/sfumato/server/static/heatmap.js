// A map of one canvas, positions across and steps down, drawn on a canvas element: of a number from
// 0 to 1 for each cell. Arrow keys move through it as a click does. Knows no tokens.

import { el } from './dom.js';

const ROW = 11; // pixels; less where there are many steps
const MOST = 220;

export class HeatMap {
  #canvas;
  #size = { positions: 0, steps: 0 };
  #value = () => 0;
  #at = null;

  /** onPick(position, step): both counted from 0. */
  constructor(title, legend, onPick) {
    this.onPick = onPick;
    this.#canvas = el('canvas', {
      tabindex: 0, role: 'img', 'aria-label': `${title}. Arrow keys move, and show a position.`,
      on: { click: (event) => this.#click(event), keydown: (event) => this.#key(event) },
    });
    this.element = el('figure', { class: 'heat' },
      el('figcaption', {}, el('span', {}, title),
        el('span', { class: 'legend' }, legend[0], el('i', { class: 'ramp' }), legend[1])),
      this.#canvas);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** value(position, step) → 0 to 1; at: { position, step } looked at, or null. */
  show(positions, steps, value, at) {
    this.#size = { positions, steps };
    this.#value = value;
    this.#at = at;
    this.draw();
  }

  draw() {
    const { positions, steps } = this.#size;
    const wide = this.element.clientWidth;
    if (!wide || !positions || !steps) return;
    const row = Math.max(2, Math.min(ROW, Math.floor(MOST / steps)));
    const scale = devicePixelRatio || 1;
    this.#canvas.width = Math.round(wide * scale);
    this.#canvas.height = Math.round(row * steps * scale);
    this.#canvas.style.height = `${row * steps}px`;
    const pen = this.#canvas.getContext('2d');
    const style = getComputedStyle(this.element);
    const [paper, accent, ink] = ['--sunken', '--accent', '--ink'].map((n) => style.getPropertyValue(n));
    const across = this.#canvas.width / positions, down = row * scale;
    const gap = across > 4 ? scale : 0;
    for (let s = 0; s < steps; s++) {
      for (let p = 0; p < positions; p++) {
        const amount = Math.max(0, Math.min(1, this.#value(p, s)));
        pen.fillStyle = `color-mix(in oklab, ${accent} ${Math.round(amount * 100)}%, ${paper})`;
        pen.fillRect(p * across, s * down, across - gap, down - gap);
      }
    }
    if (!this.#at) return;
    pen.strokeStyle = ink;
    pen.lineWidth = scale;
    const frame = Math.max(across, 3 * scale);
    const x = Math.min(this.#at.position * across, this.#canvas.width - frame);
    pen.strokeRect(x + scale / 2, this.#at.step * down + scale / 2, frame - scale, down - scale);
  }

  #click(event) {
    const box = this.#canvas.getBoundingClientRect();
    const { positions, steps } = this.#size;
    const position = Math.floor(((event.clientX - box.left) / box.width) * positions);
    const step = Math.floor(((event.clientY - box.top) / box.height) * steps);
    this.#pick(position, step);
  }

  #key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const { position, step } = this.#at ?? { position: -move[0], step: this.#size.steps - 1 - move[1] };
    this.#pick(position + move[0], step + move[1]);
  }

  #pick(position, step) {
    const { positions, steps } = this.#size;
    if (!positions || !steps) return;
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.onPick(within(position, positions), within(step, steps));
  }
}
