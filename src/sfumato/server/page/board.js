// Boards of digits, which are drawn as grids: a Sudoku in a question, and its solution in a reply.
// Knows texts and elements, and no model.

import { el } from './dom.js';

const BOARD = /^(?:[^\n]*\n)?(?:[\d._] ?){3,9}(?:\n(?:[\d._] ?){3,9}){2,8}$/;
const GIVEN = /\d/;

/** Whether a text is a board of digits. */
export const isBoard = (text) => BOARD.test(text.trim());

/**
 * The puzzle in a text: { title, rows: [['2', '', …], …], size }, a cell '' where it is to be found.
 * null where there is none whose sides are equal.
 */
export function puzzleIn(text) {
  if (!isBoard(text)) return null;
  const lines = text.trim().split('\n');
  const isRow = (line) => /^(?:[\d._] ?)+$/.test(line);
  const title = isRow(lines[0]) ? '' : lines.shift();
  const rows = lines.map((line) => [...line.replaceAll(' ', '')].map((c) => (GIVEN.test(c) ? c : '')));
  const size = rows.length;
  return rows.every((row) => row.length === size) ? { title, rows, size } : null;
}

/** The class of a board of so many cells a side: where its thick lines run. */
export const boardClass = ({ size }) => (size === 4 || size === 9 ? `board size-${size}` : 'board');

/** A puzzle as a grid. Its cells are read out row by row. */
export function grid(puzzle) {
  const said = puzzle.rows.map((row) => row.map((cell) => cell || 'empty').join(' ')).join('; ');
  const box = el('span', { class: `grid ${boardClass(puzzle)}`, role: 'img', 'aria-label': `Board: ${said}` },
    ...puzzle.rows.map((row) => el('span', { class: 'row' },
      ...row.map((cell) => el('span', { class: cell ? 'cell given' : 'cell' }, cell)))));
  box.style.setProperty('--size', puzzle.size);
  return box;
}
