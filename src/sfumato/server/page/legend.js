// What the colours of a canvas mean, as a list that a button opens. Knows the classes of tokens (see
// reading.js), and no reply.

import { button, el } from './dom.js';

const TOKENS = [
  ['', 'settled, or certain'],
  ['haze-1', 'a little uncertain: entropy over 0.05 nats'],
  ['haze-2', 'uncertain: over 0.5 nats'],
  ['haze-3', 'very uncertain: over 1.5 nats; noise looks so too'],
  ['glow-0', 'changed in this step; the colour fades over the next two'],
];
const BOARD = [['given', 'a digit that the question gives'], ['found', 'a digit that was found']];

/** { button, list }: the button shows and hides the list. isBoard: the canvas is a grid of digits. */
export function legend(isBoard = false) {
  const rows = isBoard ? [...TOKENS, ...BOARD] : TOKENS;
  const sample = isBoard ? '7' : 'word';
  const list = el('dl', { class: 'colours', hidden: true });
  const fill = () => list.replaceChildren(...rows.flatMap(([style, meaning]) => [
    el('dt', { 'aria-hidden': 'true' }, el('span', { class: style }, sample)),
    el('dd', {}, meaning)]));
  const opener = button('Colours', () => {
    fill();
    list.hidden = !list.hidden;
    opener.setAttribute('aria-expanded', String(!list.hidden));
    list.scrollIntoView({ block: 'nearest' });
  }, { 'aria-expanded': 'false' });
  return { button: opener, list };
}
