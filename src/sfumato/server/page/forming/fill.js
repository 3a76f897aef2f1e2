// The Fill mode: a text with holes, or a Sudoku, whose given digits are pinned. Knows what is asked
// and how the answer is shown.

import { fill, tokenCount } from '../api.js';
import { puzzleIn } from '../board.js';
import { el } from '../dom.js';
import { Board, isSolved } from './board.js';
import { boardTokens, filledTokens, isHole, partsOf, partsOfRows } from './holes.js';
import { Mode, Wrong } from './mode.js';

const HOLE = '{{6}}'; // where nothing is selected
const SHOWN = 8; // holes whose figures are shown
const ROWS = /^(?:[.1-4]{4}(?:\n[.1-4]{4}){3}|[.1-9]{9}(?:\n[.1-9]{9}){8})$/;

export class Fill extends Mode {
  #kind = 'text';
  #prompt = ''; // what stands before the rows of a Sudoku in its question

  constructor(element, settings) {
    super(element, {
      settings,
      hint: 'The text forms here. What is given stays as it is, and all holes are filled at once.',
      blame: {},
    });
    this.text = this.form.elements.text;
    this.board = new Board(element.querySelector('#fill-board'), () => this.changed('rows'));
    this.kinds = [...element.querySelectorAll('.kinds button')];
    for (const kind of this.kinds) {
      kind.addEventListener('click', () => { this.#show(kind.dataset.kind); this.changed(); });
    }
    element.querySelector('#make-hole').addEventListener('click', () => this.#makeHole());
    element.querySelector('#empty-board').addEventListener('click', () => {
      this.replace({ ...this.values, rows: this.board.rows.replace(/\d/g, '.') });
      this.board.focus();
    });
    this.#show('text');
    this.restore();
  }

  meet(about) {
    super.meet(about);
    const sudoku = about.examples.find(({ rows }) => rows);
    element(this, '.kinds').hidden = !sudoku;
    if (!sudoku) { this.#show('text'); return; }
    this.#prompt ||= sudoku.prompt;
    if (!this.board.rows) this.board.rows = sudoku.rows;
  }

  fromExample({ text = '', question = '', prompt, rows }) {
    return rows ? { ...this.values, kind: 'sudoku', prompt, rows } : { ...this.values, kind: 'text', text, question };
  }

  get values() {
    return { ...super.values, kind: this.#kind, prompt: this.#prompt, rows: this.board.rows };
  }

  set values(values) {
    super.values = values;
    if (typeof values.prompt === 'string') this.#prompt = values.prompt;
    if (ROWS.test(values.rows)) this.board.rows = values.rows;
    this.#show(values.kind === 'sudoku' ? 'sudoku' : 'text');
  }

  request(fields, signal) {
    return this.#kind === 'text' ? this.#fillText(fields, signal) : this.#fillBoard(fields, signal);
  }

  #fillText(fields, signal) {
    const { text, question } = this.values;
    const parts = partsOf(text);
    if (!parts.some(isHole)) {
      throw new Wrong('text', 'The text has no hole. Select some words and press “Make a hole”, or write {{6}}.');
    }
    const messages = question.trim() ? { messages: [{ role: 'user', content: question }] } : {};
    return {
      frames: fill({ parts, ...messages, ...fields }, signal),
      end: ({ content, holes, warnings = [] }) => ({
        text: content, final: filledTokens(parts, holes), note: warnings.join(' '), extra: figures(holes),
      }),
    };
  }

  #fillBoard(fields, signal) {
    const { rows } = this.board;
    if (this.board.isFull) throw new Wrong('rows', 'No cell is empty. Remove some digits.');
    const content = `${this.#prompt}\n${rows}`;
    const puzzle = puzzleIn(rows);
    return {
      frames: fill({ parts: partsOfRows(rows), messages: [{ role: 'user', content }], ...fields }, signal),
      stage: { puzzle },
      end: ({ content: filled }) => ({
        text: filled,
        final: boardTokens(puzzle, filled),
        note: isSolved(filled) ? 'Solved: each digit stands once in every row, column and box.'
          : 'Not solved: a digit stands twice in a row, column or box.',
      }),
    };
  }

  #show(kind) {
    this.#kind = kind;
    for (const button of this.kinds) button.setAttribute('aria-pressed', String(button.dataset.kind === kind));
    for (const part of this.form.querySelectorAll('div[data-kind]')) part.hidden = part.dataset.kind !== kind;
    this.blame = kind === 'text' ? { parts: 'text', messages: 'question' } : { parts: 'rows', messages: 'rows' };
    this.runButton.textContent = kind === 'text' ? 'Fill the holes' : 'Fill the grid';
  }

  /** What is selected becomes a hole of as many tokens. */
  async #makeHole() {
    const { text } = this;
    const { selectionStart: from, selectionEnd: to } = text;
    const selected = text.value.slice(from, to);
    let hole = HOLE;
    try {
      if (selected) hole = `{{${await tokenCount(selected)}}}`;
    } catch (error) {
      this.complain('text', error.message);
      return;
    }
    if (text.value.slice(from, to) !== selected) return; // written meanwhile
    text.setRangeText(hole, from, to, 'end');
    text.setSelectionRange(from + 2, from + hole.length - 2); // another number can be written at once
    text.focus();
    this.changed('text');
  }
}

const element = (mode, selector) => mode.element.querySelector(selector);

/** A line for each hole: how probable its text is, and what else was tried. */
function figures(holes) {
  const lines = holes.slice(0, SHOWN).map(({ text, probability, alternatives = [] }) => {
    const others = alternatives.filter((other) => other.text !== text).sort((a, b) => b.probability - a.probability);
    const tried = others.slice(0, 2).map((other) => `“${other.text}” ${percent(other.probability)}`);
    return el('li', {}, el('span', { class: 'mono' }, `“${text}”`), ` ${percent(probability)}`,
      tried.length ? el('span', { class: 'dim' }, ` · also tried: ${tried.join(', ')}`) : '');
  });
  return [el('ul', { class: 'holes', 'aria-label': 'Holes' }, ...lines)];
}

const percent = (share) => `${(share * 100).toFixed(share > 0.995 || share < 0.001 ? 0 : 1)} %`;
