// A Sudoku to write into: a field for each cell. Arrow keys move between the cells. Knows no server.

import { el } from '../dom.js';

export class Board {
  #cells = [];
  #size = 0;

  /** onInput(): a digit was written or removed. */
  constructor(element, onInput) { Object.assign(this, { element, onInput }); }

  /** As a question has them: a line for each row, "." for an empty cell. */
  get rows() {
    const digits = this.#cells.map((cell) => cell.value || '.');
    return Array.from({ length: this.#size }, (_, row) =>
      digits.slice(row * this.#size, (row + 1) * this.#size).join('')).join('\n');
  }

  set rows(text) {
    const lines = text.split('\n');
    if (lines.length !== this.#size) this.#draw(lines.length);
    [...lines.join('')].forEach((digit, i) => { this.#cells[i].value = digit === '.' ? '' : digit; });
  }

  get isEmpty() { return !this.#cells.some((cell) => cell.value); }

  get isFull() { return this.#cells.every((cell) => cell.value); }

  clear() { for (const cell of this.#cells) cell.value = ''; }

  focus() { this.#cells[0].focus(); }

  #draw(size) {
    this.#size = size;
    this.#cells = Array.from({ length: size * size }, (_, i) => {
      const cell = el('input', {
        type: 'text', inputmode: 'numeric', maxlength: 1, autocomplete: 'off',
        'aria-label': `Row ${Math.floor(i / size) + 1}, column ${i % size + 1}`,
      });
      cell.addEventListener('focus', () => cell.select());
      cell.addEventListener('input', () => {
        if (!(Number(cell.value) >= 1 && Number(cell.value) <= size)) cell.value = '';
        this.onInput();
      });
      cell.addEventListener('keydown', (event) => this.#move(event, i));
      return cell;
    });
    this.element.className = `cells of-${size}`;
    this.element.style.setProperty('--size', size);
    this.element.replaceChildren(...this.#cells);
  }

  #move(event, i) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!moves[event.key]) return;
    const [down, right] = moves[event.key];
    event.preventDefault();
    const row = Math.floor(i / this.#size) + down, column = i % this.#size + right;
    if (row >= 0 && row < this.#size && column >= 0 && column < this.#size) {
      this.#cells[row * this.#size + column].focus();
    }
  }
}

/** Whether a full board has each digit once in every row, column and box. */
export function isSolved(rows) {
  const lines = rows.split('\n').map((line) => [...line]);
  const size = lines.length, box = Math.sqrt(size);
  const groups = [...lines, ...lines.map((_, i) => lines.map((line) => line[i]))];
  for (let i = 0; i < size; i++) {
    const top = Math.floor(i / box) * box, left = i % box * box;
    groups.push(lines.slice(top, top + box).flatMap((line) => line.slice(left, left + box)));
  }
  const isDigit = (text) => text >= '1' && text <= String(size);
  return groups.every((group) => group.every(isDigit) && new Set(group).size === size);
}
