// Settled text as Markdown: parsed by marked, cleaned by DOMPurify (both in vendor/). What a model
// writes never loads anything and never becomes markup of its own: HTML in it stays text, and an
// image becomes a link. Knows text alone.

import DOMPurify from './vendor/dompurify.js';
import { Marked } from './vendor/marked.js';

const MOST = 50_000; // characters: some tenths of a second; longer text is shown as it is
const PLAIN = new Set(['space', 'paragraph', 'text', 'escape', 'br', 'html']);
const ALLOWED = {
  ALLOWED_TAGS: [
    'p', 'br', 'hr', 'strong', 'em', 'del', 'code', 'pre', 'blockquote', 'ul', 'ol', 'li', 'a',
    'h4', 'h5', 'h6', 'table', 'thead', 'tbody', 'tr', 'th', 'td',
  ],
  ALLOWED_ATTR: ['href', 'start', 'align'],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ['start', 'align'], // which hold no address
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');

const marked = new Marked({
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

/** The text as elements; null where Markdown would draw nothing in another way. */
export function render(text) {
  if (text.length > MOST) return null;
  let fragment;
  try {
    const tokens = marked.lexer(text);
    if (!hasMarkdown(tokens)) return null;
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
