// Blocks of code in settled text: a line with the language and a button that copies, and light colours for
// comments, strings, numbers and keywords. Knows elements and no model; colours texts and runs nothing.

import { button, el } from './dom.js';

const MOST = 20_000; // characters; longer code has one colour
const HASH = /^(?:py|python|sh|bash|shell|zsh|console|ruby|rb|yaml|yml|toml|r|perl|make|makefile|dockerfile|julia|elixir|nix|conf|ini)$/;
const DASHES = /^(?:sql|lua|haskell|hs|ada|elm)$/;
const MARKUP = /^(?:html|xml|svg|markdown|md|vue)$/;
const PLAIN = /^(?:text|txt|plain|output|diff)$/;
const KEYWORDS = new Set((
  'abstract and as assert async await begin bool break case catch char class const continue crate def default defer del do '
  + 'double elif else end enum except export extends extern false False final finally float fn for foreach from func function '
  + 'global go if impl implements import in int interface is lambda let long loop match mod module move mut namespace new nil '
  + 'none None nonlocal not null nullptr of or override package pass private protected pub public raise ref return self '
  + 'short signed sizeof static str string struct super switch then this throw trait true True try type typedef typeof '
  + 'undefined union unless unsafe unsigned until use using var virtual void where while with yield '
  + 'select insert update delete create table join on group by order limit values into set SELECT INSERT UPDATE DELETE CREATE '
  + 'TABLE FROM WHERE JOIN ON GROUP BY ORDER LIMIT VALUES INTO SET AND OR NOT NULL AS').split(' '));

const STRINGS = String.raw`"""[^]*?"""|'''[^]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|${'`'}(?:\\.|[^\\${'`'}])*${'`'}`;

function patternOf(language) {
  const comment = HASH.test(language) ? String.raw`#[^\n]*`
    : DASHES.test(language) ? String.raw`--[^\n]*`
    : MARKUP.test(language) ? '<!--[^]*?-->'
    : String.raw`//[^\n]*|/\*[^]*?\*/`;
  return new RegExp(String.raw`(?<comment>${comment})|(?<string>${STRINGS})|(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_]\w*)`, 'g');
}

/** The text as nodes: plain text, and spans of a class each. */
function coloured(text, language) {
  if (text.length > MOST || PLAIN.test(language)) return [text];
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(patternOf(language))) {
    const kind = Object.entries(match.groups).find(([, found]) => found !== undefined)[0];
    if (kind === 'word' && !KEYWORDS.has(match[0])) continue;
    nodes.push(text.slice(last, match.index), el('span', { class: `code-${kind}` }, match[0]));
    last = match.index + match[0].length;
  }
  return [...nodes, text.slice(last)];
}

/** Gives each `pre > code` below an element its colours and its line with a button. */
export function dressCode(element) {
  for (const code of element.querySelectorAll('pre > code')) {
    const language = /language-([\w+#.-]{1,20})/.exec(code.className)?.[1] ?? '';
    const text = code.textContent;
    code.removeAttribute('class');
    code.replaceChildren(...coloured(text, language.toLowerCase()));
    const copy = navigator.clipboard ? [button('Copy code', async ({ target }) => {
      await navigator.clipboard.writeText(text);
      target.textContent = 'Copied';
      setTimeout(() => { target.textContent = 'Copy code'; }, 1500);
    })] : [];
    const box = el('div', { class: 'code' }, el('div', { class: 'code-head' }, el('span', {}, language || 'code'), ...copy));
    const block = code.closest('.scroller') ?? code.parentElement;
    block.replaceWith(box);
    box.append(block);
  }
}
