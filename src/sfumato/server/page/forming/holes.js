// Texts with holes as a person writes them, as `sfumato fill` reads them: {{6}} is 6 tokens, {{<=8}} up
// to 8, {{a|b}} one of the texts; other braces are text. Knows no DOM and no server.

import { harmless } from '../tokens.js';

const HOLE = /\{\{(?:(\d{1,8})|<=\s*(\d{1,8})|([^{}|]+(?:\|[^{}|]+)+))\}\}/g;

/** The parts of a text, as /v1/fill takes them: texts and holes. */
export function partsOf(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(HOLE)) {
    const [whole, exact, most, choices] = match;
    parts.push(text.slice(end, match.index));
    parts.push(choices ? { choices: choices.split('|') }
      : exact ? { tokens: Number(exact) } : { at_most: Number(most) });
    end = match.index + whole.length;
  }
  return [...parts, text.slice(end)].filter((part) => part !== '');
}

export const isHole = (part) => typeof part !== 'string';

/** The same of a board's rows: a hole of one token for each empty cell. */
export function partsOfRows(rows) {
  const parts = [];
  for (const text of rows) {
    if (text === '.') parts.push({ tokens: 1 });
    else if (parts.length && !isHole(parts.at(-1))) parts.push(parts.pop() + text);
    else parts.push(text);
  }
  return parts;
}

/** A filled board as tokens to draw; puzzle: see board.js. */
export function boardTokens(puzzle, text) {
  return text.split('\n').flatMap((line, row) => [
    ...row ? [{ text: '\n', style: '' }] : [],
    ...[...line].map((digit, i) => ({ text: digit, style: puzzle.rows[row][i] ? 'cell given' : 'cell' })),
  ]).map((token, place) => ({ key: `0.${place}`, ...token })); // as the canvas's own positions
}

/** A filled text as tokens to draw: [{ key, text, style }]; holes: of the server's answer. */
export function filledTokens(parts, holes) {
  let next = 0;
  return parts.map((part, i) => (isHole(part)
    ? { key: `hole ${next}`, text: harmless(holes[next++].text), style: 'hole' }
    : { key: `text ${i}`, text: harmless(part), style: '' }));
}
