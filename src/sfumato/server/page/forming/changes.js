// What differs between two texts, word by word. Knows no DOM.

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_PAIRS = 1_000_000; // of words that are compared; above, all between the common ends has changed

/** [{ text, kind: 'same' | 'added' | 'removed' }]: from one text to the other. */
export function changes(before, after) {
  const old = before.match(WORDS) ?? [], now = after.match(WORDS) ?? [];
  let start = 0, end = 0;
  while (start < Math.min(old.length, now.length) && old[start] === now[start]) start++;
  while (end < Math.min(old.length, now.length) - start && old.at(-1 - end) === now.at(-1 - end)) end++;
  const pieces = now.slice(0, start).map((text) => ({ text, kind: 'same' }));
  pieces.push(...between(old.slice(start, old.length - end), now.slice(start, now.length - end)));
  pieces.push(...now.slice(now.length - end).map((text) => ({ text, kind: 'same' })));
  return pieces;
}

/** The same of lists of words: what is common is their longest common subsequence. */
function between(old, now) {
  const kept = (text, kind) => ({ text, kind });
  if (old.length * now.length > MOST_PAIRS) {
    return [...old.map((text) => kept(text, 'removed')), ...now.map((text) => kept(text, 'added'))];
  }
  const wide = now.length + 1;
  const common = new Uint16Array((old.length + 1) * wide); // words that the rests have in common
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = now.length - 1; j >= 0; j--) {
      common[i * wide + j] = old[i] === now[j] ? common[(i + 1) * wide + j + 1] + 1
        : Math.max(common[(i + 1) * wide + j], common[i * wide + j + 1]);
    }
  }
  const pieces = [];
  let i = 0, j = 0;
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) { pieces.push(kept(now[j], 'same')); i++; j++; }
    else if (i < old.length && (j === now.length || common[(i + 1) * wide + j] >= common[i * wide + j + 1])) {
      pieces.push(kept(old[i++], 'removed'));
    } else pieces.push(kept(now[j++], 'added'));
  }
  return pieces;
}

/** The tokens of a draft with `changed` in the style of those that a text does not have there. */
export function withChanges(tokens, before) {
  const added = []; // for each character of the draft
  for (const { text, kind } of changes(before, tokens.map(({ text }) => text).join(''))) {
    if (kind !== 'removed') for (let i = 0; i < text.length; i++) added.push(kind === 'added');
  }
  let at = 0;
  return tokens.map((token) => {
    const isChanged = added.slice(at, at += token.text.length).some(Boolean);
    const haze = token.style.replace(/ ?glow-\d/, '');
    return { ...token, style: isChanged ? `${haze} changed` : haze };
  });
}
