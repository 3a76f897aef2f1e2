// The turn of a person: what they wrote, and the pictures and files that they gave. The exported replay has
// it too. Knows texts and elements, and no model.

import { grid, isBoard, puzzleIn } from './board.js';
import { el } from './dom.js';
import { harmless } from './tokens.js';

/** Pictures, { name, thumb }, in a row; null where there are none. */
export const thumbnails = (pictures = []) => (pictures.length
  ? el('p', { class: 'pictures' }, ...pictures.map(({ name, thumb }) => el('img', { src: thumb, alt: name, on: { load: sharpen } })))
  : null);

const FEW = 64; // pixels across: below, each is shown as the square that the model sees

function sharpen({ target }) {
  target.classList.toggle('pixels', target.naturalWidth < FEW);
}

/** Text files, { name, text }, as names that open; null where there are none. */
const attachments = (files) => (files?.length
  ? el('ul', { class: 'files' }, ...files.map(({ name, text }) => el('li', {}, el('details', {},
    el('summary', {}, harmless(name), el('span', { class: 'dim' }, ` ${text.length.toLocaleString('en')} characters`)),
    el('pre', { tabindex: 0 }, harmless(text))))))
  : null);

/** A turn; a puzzle is drawn as a grid. */
export function question(text, pictures, files = []) {
  const puzzle = puzzleIn(text);
  const shown = puzzle ? [puzzle.title && el('p', {}, harmless(puzzle.title)), grid(puzzle)] : [harmless(text)];
  const kind = !puzzle && isBoard(text) ? 'bubble said board' : 'bubble said';
  return el('li', { class: 'turn user' }, el('h3', { class: 'unseen' }, 'You'),
    el('div', { class: kind }, thumbnails(pictures) ?? '', attachments(files) ?? '', ...shown));
}
