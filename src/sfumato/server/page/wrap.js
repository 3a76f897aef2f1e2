// Lines of a fixed width from a canvas's tokens, with line breaks that hold still: broken afresh
// for every draft, lines would jump about; so a break stays at the token where it was for as long
// as the line fits. Widths are in cells of a monospaced font. Knows no styles and no ids.

/** Cells that a character takes: two for East Asian wide ones and emoji, none for what combines. */
function cells(character) {
  const code = character.codePointAt(0);
  if (code < 0x300) return 1;
  if (/\p{M}|[\u200b-\u200f\ufe00-\ufe0f]/u.test(character)) return 0;
  const wide = (code >= 0x1100 && code <= 0x115f) || (code >= 0x2e80 && code <= 0xa4cf)
    || (code >= 0xac00 && code <= 0xd7a3) || (code >= 0xf900 && code <= 0xfaff)
    || (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60)
    || (code >= 0x1f300 && code <= 0x1faff) || (code >= 0x20000 && code <= 0x3fffd);
  return wide ? 2 : 1;
}

function width(text) {
  let total = 0;
  for (const character of text) total += cells(character);
  return total;
}

/** `text` in parts of at most `limit` cells. */
function chop(text, limit) {
  const parts = [];
  let part = '', used = 0;
  for (const character of text) {
    const need = cells(character);
    if (part && used + need > limit) { parts.push(part); part = ''; used = 0; }
    part += character;
    used += need;
  }
  parts.push(part);
  return parts;
}

/** For each piece, the cells from its start to the next white space after it. */
function wordWidths(pieces) {
  const widths = new Array(pieces.length).fill(0);
  let following = 0;
  for (let i = pieces.length - 1; i >= 0; i--) {
    const piece = pieces[i];
    const ends = piece.includes('\n') || (piece.endsWith(' ') && piece !== ' ');
    widths[i] = width(piece.split('\n')[0]) + (ends ? 0 : following);
    following = /^\s/.test(piece) ? 0 : widths[i];
  }
  return widths;
}

/**
 * pieces: text of each token; columns: cells of a line; earlier: the breaks of the draft before
 * (null at first: then lines are filled to seven eighths, so that they can grow a little later).
 * Returns { lines: [[{ piece, text }]], breaks: Set of the pieces that begin a wrapped line }.
 */
export function wrap(pieces, columns, earlier) {
  const words = wordWidths(pieces);
  const limit = earlier ? columns : Math.max(1, columns - Math.floor(columns / 8));
  const lines = [[]];
  const breaks = new Set();
  let column = 0;
  pieces.forEach((piece, index) => {
    piece.split('\n').forEach((line, number) => {
      let part = line;
      if (number) { lines.push([]); column = 0; }
      if (!part) return;
      const begins = part[0] === ' ' || (index > 0 && pieces[index - 1].endsWith(' '));
      const need = begins && words[index] <= columns ? words[index] : width(part);
      const held = earlier?.has(index) && begins && column >= columns * 0.75;
      if (column && (held || column + need > limit)) {
        lines.push([]);
        breaks.add(index);
        part = part.replace(/^ +/, '');
        column = 0;
      }
      if (!part) return;
      chop(part, columns).forEach((chunk, nth) => {
        if (nth) { lines.push([]); column = 0; }
        lines.at(-1).push({ piece: index, text: chunk });
        column += width(chunk);
      });
    });
  });
  return { lines, breaks };
}
