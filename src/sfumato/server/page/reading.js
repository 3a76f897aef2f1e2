// What a reader sees of a reply at one moment of its denoising: the tokens of answer and thought, and
// how each is drawn. Knows traces, and no elements; the exported replay draws with it too.

import { harmless, isMarker, joinBytes, readTokens, START } from './tokens.js';

const HAZE = [0.05, 0.5, 1.5]; // nats at which a position is drawn one shade hazier
export const NOISE = -1; // the number of the draft before the first: what a canvas begins as

/**
 * Of a text with holes, each canvas is all of it, and one is shown; else they follow each other.
 * { answer, thought }: [{ key, canvas, text, style }] as they stand at `frame` (null: at the end).
 * puzzle: the board that was asked about, see board.js; its digits are drawn as given.
 */
export function tokensAt(trace, frame, puzzle = null) {
  const shown = { answer: [], thought: [] };
  let state = START;
  const last = frame ? frame.canvas : trace.data.length - 1;
  for (let c = trace.data[last]?.pinned ? last : 0; c <= last; c++) {
    const { drafts, settled, noise } = trace.data[c];
    const d = frame && c === last ? frame.draft : drafts.length - 1;
    const isDrafting = (frame && c === last) || !settled;
    if (d < 0 && isDrafting) {
      const list = shown[state.within === 'thought' ? 'thought' : 'answer'];
      if (frame && noise) list.push(...hazeOf(trace.data[c], c, puzzle));
      continue;
    }
    const tokens = isDrafting ? drafts[d]?.tokens ?? [] : settled.tokens;
    const read = readTokens(tokens, state);
    state = read.state;
    joinBytes(tokens).forEach((text, p) => {
      const kind = read.kinds[p];
      if (!kind) return;
      const style = isDrafting ? styleOf(trace, c, p, d) : kind === 'call' ? 'call'
        : settled.doubted?.includes(p) ? 'doubted' : '';
      const list = shown[kind === 'thought' ? 'thought' : 'answer'];
      list.push({ key: `${c}.${p}`, canvas: c, text: harmless(text), style });
    });
  }
  if (puzzle) inCells(shown.answer, puzzle);
  return shown;
}

function styleOf(trace, c, p, d) {
  const { drafts, pinned } = trace.data[c];
  if (pinned?.[p]) return '';
  const draft = drafts[d];
  const age = trace.age(c, p, d);
  const shade = HAZE.filter((nats) => draft.entropy[p] > nats).length;
  const haze = draft.accepted[p] ? Math.max(0, shade - 1) : Math.max(1, shade);
  return `haze-${haze}${age < 3 ? ` glow-${age}` : ''}${pinned ? ' hole' : ''}`;
}

/** The random tokens that a canvas begins as; on a board, each where the digit of its position is. */
function hazeOf({ noise, pinned }, c, puzzle) {
  const texts = joinBytes(noise).map((text, p) => {
    if (isMarker(text)) return pinned?.[p] ? '' : '·'; // what ends a text with holes is not shown
    return pinned?.[p] ? harmless(text) : harmless(text).replaceAll('\n', '⏎') || ' ';
  });
  const width = puzzle && texts.every((text) => text.length <= 1) ? puzzle.size + 1 : 0;
  const count = width ? width * puzzle.size - 1 : texts.length; // the board, and not what follows it
  return texts.slice(0, count).map((text, p) => {
    const isEnd = width && p % width === width - 1;
    const style = pinned?.[p] ? '' : `haze-3${pinned ? ' hole' : ''}`;
    return { key: `${c}.${p}`, canvas: c, text: isEnd ? '\n' : text, style };
  });
}

/** Single characters of a board become its cells; those that the question gave are marked. */
function inCells(tokens, puzzle) {
  let row = 0, column = 0;
  for (const token of tokens) {
    if ([...token.text].length === 1 && token.text !== '\n') {
      const given = puzzle.rows[row]?.[column];
      token.style += given && given === token.text ? ' cell given' : ' cell';
    }
    const lines = token.text.split('\n');
    if (lines.length > 1) { row += lines.length - 1; column = 0; }
    column += [...lines.at(-1)].length;
  }
}
