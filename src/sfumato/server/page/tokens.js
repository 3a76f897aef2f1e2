// What each token of a canvas is to a reader: part of the answer, of a thought, of a tool call, or
// nothing. Follows the markers of the chat format, which the server names: each is one token. A
// vocabulary may have <b> and the like too, which are plain text. Knows no DOM.

let format = { tokens: new Set(), ends: new Set() };

/** The markers of the model's chat format, as /props has them. Without them every token is text. */
export function useMarkers({ tokens = [], ends = [], ...roles } = {}) {
  format = { ...roles, tokens: new Set(tokens), ends: new Set(ends) };
}

export const isMarker = (token) => format.tokens.has(token);

/** Where a reply stands before its first token. */
export const START = Object.freeze({ within: 'answer', name: '' });

/**
 * kinds: for each token 'answer' | 'thought' | 'call' | '' (not shown), and the state after them,
 * with which the next canvas begins. Nothing is shown after an end.
 */
export function readTokens(tokens, state = START) {
  let { within, name } = state;
  const kinds = tokens.map((token) => {
    if (within === 'end') return '';
    if (isMarker(token)) {
      if (format.ends.has(token)) within = 'end';
      else if (token === format.call_open) within = 'call';
      else if (within === 'call') { if (token === format.call_close) within = 'answer'; }
      else if (token === format.thought_open) { within = 'header'; name = ''; }
      else if (token === format.thought_close) within = 'answer';
      return '';
    }
    if (within === 'header') {
      name += token;
      if (name === format.thought_header) { within = 'thought'; return ''; }
      if (format.thought_header.startsWith(name)) return '';
      within = 'thought';
    }
    return within;
  });
  return { kinds, state: { within, name } };
}

const BYTES = /^(?:<0x[0-9A-F]{2}>)+$/;

/** Tokens of bytes made readable: of the tokens of a character, the first has all of it. */
export function joinBytes(tokens) {
  const texts = [...tokens];
  for (let i = 0; i < tokens.length; i++) {
    let end = i;
    while (end < tokens.length && BYTES.test(tokens[end])) end++;
    if (end === i) continue;
    const pairs = tokens.slice(i, end).join('').match(/[0-9A-F]{2}(?=>)/g);
    texts.fill('', i, end);
    texts[i] = new TextDecoder().decode(Uint8Array.from(pairs, (pair) => parseInt(pair, 16)));
    i = end - 1;
  }
  return texts;
}

/** Text in which only newlines and spaces move anything: controls and reordering marks show as ·. */
export function harmless(text) {
  return text.replaceAll('\t', '    ').replaceAll('\r\n', '\n')
    .replace(/(?!\n)\p{Cc}|[\u202a-\u202e\u2066-\u2069]/gu, '·');
}

/** A token as one would quote it: white space made visible. */
export function printable(text) {
  if (text === '') return '(empty)';
  return harmless(text).replaceAll(' ', '␣').replaceAll('\n', '⏎');
}
