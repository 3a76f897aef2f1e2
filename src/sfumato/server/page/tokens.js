// What each token of a canvas is to a reader: part of the answer, of a thought, of a tool call, or
// nothing. Follows the markers of the chat format, each of which is one token. Knows no DOM.

// As text/reply.py has them. A vocabulary may have <b> and the like too, which are plain text.
const MARKERS = new Set([
  '<pad>', '<eos>', '<bos>', '<unk>', '<mask>', '<|think|>', '<|"|>',
  '<|turn>', '<turn|>', '<|channel>', '<channel|>', '<|tool>', '<tool|>',
  '<|tool_call>', '<tool_call|>', '<|tool_response>', '<tool_response|>',
  '<|image>', '<|image|>', '<image|>', '<|audio>', '<|audio|>', '<audio|>', '<|video|>',
]);
export const isMarker = (token) => MARKERS.has(token);

const ENDS = new Set(['<turn|>', '<eos>', '<|tool_response>']);
const CHANNEL = 'thought\n';

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
    if (MARKERS.has(token)) {
      if (ENDS.has(token)) within = 'end';
      else if (token === '<|tool_call>') within = 'call';
      else if (within === 'call') { if (token === '<tool_call|>') within = 'answer'; }
      else if (token === '<|channel>') { within = 'channel'; name = ''; }
      else if (token === '<channel|>') within = 'answer';
      return '';
    }
    if (within === 'channel') {
      name += token;
      if (name === CHANNEL) { within = 'thought'; return ''; }
      if (CHANNEL.startsWith(name)) return '';
      within = 'thought';
    }
    return within;
  });
  return { kinds, state: { within, name } };
}

const BYTE = /^<0x([0-9A-F]{2})>$/;

/** Tokens of single bytes made readable: of the bytes of a character, the first has all of it. */
export function joinBytes(tokens) {
  const texts = [...tokens];
  for (let i = 0; i < tokens.length; i++) {
    const bytes = [];
    while (i + bytes.length < tokens.length && BYTE.test(tokens[i + bytes.length])) {
      bytes.push(parseInt(tokens[i + bytes.length].slice(3, 5), 16));
    }
    if (!bytes.length) continue;
    texts.fill('', i, i + bytes.length);
    texts[i] = new TextDecoder().decode(Uint8Array.from(bytes));
    i += bytes.length - 1;
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
