// A value as text: JSON for the server, and the literals of Python and TypeScript for people. A Map is
// an object whose keys keep their order, which objects of JavaScript do not do for names such as "10".

const JSON_WORDS = { null: 'null', true: 'true', false: 'false' };
export const PYTHON_WORDS = { null: 'None', true: 'True', false: 'False' };
const LINE = 88; // characters; what is longer is broken
const INDENT = 2;

/** JSON in one line, for the server. */
export const json = (value) => inline(value, JSON_WORDS, ',', ':');

/** JSON, or Python with its words, in lines that a person reads; `margin` is where the text begins. */
export function pretty(value, { words = JSON_WORDS, margin = 0, indent = INDENT, line = LINE } = {}) {
  const short = inline(value, words, ', ', ': ');
  if (margin + short.length <= line || !isNested(value)) return short;
  const inner = margin + indent;
  const lines = Array.isArray(value)
    ? value.map((item) => pretty(item, { words, margin: inner, indent, line }))
    : pairs(value).map(([name, item]) => {
      const key = `${JSON.stringify(name)}: `;
      return key + pretty(item, { words, margin: inner, indent, line });
    });
  const [open, close] = Array.isArray(value) ? '[]' : '{}';
  const gap = `\n${' '.repeat(inner)}`;
  return `${open}${gap}${lines.join(`,${gap}`)}${words === PYTHON_WORDS ? ',' : ''}\n${' '.repeat(margin)}${close}`;
}

/** Whether an object literal of JavaScript with these keys would have another order, or lose one. */
export function isReordered(value) {
  if (!isNested(value)) return false;
  if (Array.isArray(value)) return value.some(isReordered);
  return pairs(value).some(([name, item]) => /^(\d+|__proto__)$/.test(name) || isReordered(item));
}

function inline(value, words, comma, colon) {
  if (Array.isArray(value)) return `[${value.map((item) => inline(item, words, comma, colon)).join(comma)}]`;
  if (!isNested(value)) return typeof value === 'boolean' || value === null ? words[value] : JSON.stringify(value);
  const parts = pairs(value).map(([name, item]) => JSON.stringify(name) + colon + inline(item, words, comma, colon));
  return `{${parts.join(comma)}}`;
}

const isNested = (value) => typeof value === 'object' && value !== null;

const pairs = (value) => value instanceof Map ? [...value] : Object.entries(value);
