// Settled text as prose, with its Markdown, formulas and code: parsed by marked, cleaned by DOMPurify (both
// in vendor/). What a model writes never loads anything and never becomes markup of its own: HTML in it
// stays text, and an image becomes a link. Knows text alone.

import { isBoard } from './board.js';
import { dressCode } from './code.js';
import DOMPurify from './vendor/dompurify.js';
import { Marked } from './vendor/marked.js';

const MOST = 50_000; // characters: some tenths of a second; longer text is shown as it is
const PLAIN = new Set(['space', 'paragraph', 'text', 'escape', 'br', 'html']);
const ALLOWED = {
  ALLOWED_TAGS: [
    'p', 'br', 'hr', 'strong', 'em', 'del', 'code', 'pre', 'blockquote', 'ul', 'ol', 'li', 'a',
    'h4', 'h5', 'h6', 'table', 'thead', 'tbody', 'tr', 'th', 'td',
  ],
  ALLOWED_ATTR: ['href', 'start', 'align', 'class'], // classes are the renderer's: a model's HTML is text
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ['start', 'align', 'class'], // which hold no address
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');

// A single $ begins a formula as Pandoc reads it: no space after it, none before the other, and no digit
// behind that, so that prices are none.
const INLINE = /^\$(?!\s)((?:\\[^\n]|[^$\\\n])+?)(?<!\s)\$(?!\d)|^\\\(([^\n]+?)\\\)/;
const DISPLAY = /^\$\$((?:\\[^]|[^$\\])+?)\$\$|^\\\[([^]+?)\\\]/;

/** An extension of marked; pattern: finds a formula where the text begins. */
function mathOf(name, level, pattern) {
  return {
    name,
    level,
    start(text) {
      const at = text.search(level === 'block' ? /^(?:\$\$|\\\[)/m : /\$|\\[([]/);
      return at < 0 ? undefined : at;
    },
    tokenizer(text) {
      const match = pattern.exec(text);
      const tex = (match?.[1] ?? match?.[2])?.trim();
      return tex ? { type: name, raw: match[0], text: tex } : undefined;
    },
    renderer: ({ text }) => `<code class="math${pattern === DISPLAY ? ' display' : ''}">${escaped(text)}</code>`,
  };
}

const marked = new Marked({
  extensions: [
    mathOf('displayBlock', 'block', DISPLAY), mathOf('displayMath', 'inline', DISPLAY),
    mathOf('inlineMath', 'inline', INLINE),
  ],
  gfm: true,
  breaks: true, // a canvas's line ends are meant
  renderer: {
    html: ({ text }) => escaped(text),
    heading({ tokens, depth }) {
      const tag = `h${Math.min(6, depth + 3)}`; // the page's own headings end at the third level
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    image({ href, text }) {
      return this.link({ href, tokens: [{ type: 'text', raw: text, text: `image: ${text || href}` }] });
    },
    checkbox: ({ checked }) => (checked ? '☑ ' : '☐ '),
  },
});

function hasMarkdown(tokens) {
  let found = false;
  // Addresses that stand for themselves are text as well.
  marked.walkTokens(tokens, (token) => {
    if (!PLAIN.has(token.type) && !(token.type === 'link' && token.raw === token.text)) found = true;
  });
  return found;
}

/** Whether a text needs its columns: a board, an object, or lines that are indented or aligned by spaces. */
function isAligned(text) {
  if (isBoard(text) || /^[[{]/.test(text)) return true;
  const lines = text.split('\n');
  return lines.some((line) => /^ {2}/.test(line)) || lines.filter((line) => /\S {2,}\S/.test(line)).length > 1;
}

/** The text as elements; null where it is better read as a canvas: without Markdown, and in columns. */
export function render(text) {
  if (!text || text.length > MOST) return null;
  let fragment;
  try {
    const tokens = marked.lexer(text);
    if (!hasMarkdown(tokens) && isAligned(text)) return null;
    fragment = DOMPurify.sanitize(marked.parser(tokens), ALLOWED);
  } catch (error) {
    if (error instanceof RangeError) return null; // nested deeper than anything is meant
    throw error;
  }
  for (const link of fragment.querySelectorAll('a')) {
    if (link.hasAttribute('href')) Object.assign(link, { target: '_blank', rel: 'noopener noreferrer nofollow' });
  }
  inOrder(fragment);
  for (const wide of fragment.querySelectorAll('pre, table')) inScroller(wide);
  dressCode(fragment);
  return fragment;
}

/** Headings begin at the fourth level, and none is skipped on the way down. */
function inOrder(fragment) {
  let above = 3;
  for (const heading of fragment.querySelectorAll('h4, h5, h6')) {
    const level = Math.min(Number(heading.tagName[1]), above + 1);
    above = level;
    if (heading.tagName === `H${level}`) continue;
    const other = document.createElement(`h${level}`);
    other.append(...heading.childNodes);
    heading.replaceWith(other);
  }
}

/** What may be wider than the bubble scrolls by itself, from the keyboard too. */
function inScroller(wide) {
  const box = document.createElement('div');
  box.className = 'scroller';
  box.tabIndex = 0;
  box.setAttribute('role', 'group');
  box.setAttribute('aria-label', wide.tagName === 'TABLE' ? 'Table' : 'Code');
  wide.replaceWith(box);
  box.append(wide);
}
