// One question as a card: its fields, which write into the question, and a bar for each option. Calls
// back with every change. Knows neither the server nor the other cards.

import { button, el } from '../dom.js';
import { advice, figures, headline, isUnsure, percent } from './figures.js';
import { KINDS, MOST_OPTIONS, meanings, option, probabilities } from './questions.js';

export class Card {
  #bars = []; // one for each row: { bar, number, row }

  /** onChange(): the question is another one; onRemove(card). */
  constructor(question, { onChange, onRemove }) {
    Object.assign(this, { question, onChange, onRemove });
    this.answer = null; // what is shown, and the key of what it answers, see asking.js
    this.key = '';
    this.refused = null; // { key, words }: what the server said of it
    const kind = el('select', { 'aria-label': 'Kind', on: { change: () => this.#turnInto(kind.value) } },
      ...Object.entries(KINDS).map(([value, name]) => el('option', { value, selected: value === question.kind }, name)));
    this.instructions = this.#field('Instructions', 'instructions', question, 'the question, in words', 'textarea');
    this.instructions.rows = 1;
    this.rows = el('ol', { class: 'rows' });
    this.adder = button('', () => this.#add(this.question.options.length), { class: 'quiet small' });
    this.meanings = button('', () => this.#showMeanings(!this.isExplained),
      { class: 'quiet small', title: 'What the options mean, for the model to read' });
    this.result = el('p', { class: 'headline', 'aria-live': 'polite' });
    this.figures = el('ul', { class: 'figures dim' });
    this.advice = el('p', { class: 'advice', hidden: true });
    this.problem = el('p', { class: 'problem', role: 'alert', hidden: true });
    this.element = el('li', {}, el('section', { class: 'question' },
      el('header', {}, kind, this.result,
        button('✕', () => onRemove(this), { 'aria-label': 'Remove the question', title: 'Remove the question' })),
      this.instructions, this.rows, el('div', { class: 'row-tools' }, this.adder, this.meanings),
      this.problem, this.advice, this.figures));
    this.isExplained = meanings(question) > 0;
    this.#draw();
  }

  /** Its place, for readers of the screen. */
  set number(number) { this.element.firstChild.setAttribute('aria-label', `Question ${number}`); }

  focus() { this.instructions.focus(); }

  /** Shows an answer to a question of this kind; null: there is none. */
  show(answer) {
    const { question } = this;
    this.answer = answer;
    const shares = answer ? probabilities(question, answer) : [];
    const best = Math.max(...shares);
    this.#bars.forEach(({ bar, number, row }, i) => {
      const share = shares[i] ?? null;
      bar.style.width = `${(share ?? 0) * 100}%`;
      number.textContent = share === null ? '' : percent(share);
      row.classList.toggle('best', share !== null && share === best);
    });
    const words = answer ? headline(question, answer) : '';
    if (this.result.textContent !== words) this.result.textContent = words; // else it is read out again
    this.figures.replaceChildren(...(answer ? figures(answer) : []).map(({ text, title, warns }) =>
      el('li', { title, class: warns && 'warns' }, text)));
    this.advice.textContent = answer && isUnsure(answer) ? advice(answer) : '';
    this.advice.hidden = !this.advice.textContent;
  }

  /** Whether what is shown is the answer to something else by now. */
  set isStale(stale) { this.element.firstChild.classList.toggle('stale', stale); }

  /** What is wrong with it and what is still to be written, in words; '': nothing. */
  complain(wrong, missing) {
    const words = wrong || missing;
    if (this.problem.textContent !== words) this.problem.textContent = words; // else it is read out again
    this.problem.hidden = !words;
    this.element.firstChild.classList.toggle('wrong', Boolean(wrong));
  }

  #turnInto(kind) {
    this.question.kind = kind;
    this.#draw();
    this.onChange();
  }

  #showMeanings(shown) {
    this.isExplained = shown;
    this.#draw();
  }

  #add(at) {
    if (this.question.options.length >= MOST_OPTIONS) return;
    this.question.options.splice(at, 0, option());
    this.#draw();
    this.#focusRow(at);
    this.onChange();
  }

  #drop(at) {
    this.question.options.splice(at, 1);
    this.#draw();
    this.#focusRow(Math.max(0, at - 1));
    this.onChange();
  }

  #focusRow(at) { (this.rows.children[at]?.querySelector('input') ?? this.adder).focus(); }

  /** Draws the rows anew; the answer stays where the rows are still the same. */
  #draw() {
    const { kind, options } = this.question;
    const isScore = kind === 'score';
    this.#bars = [];
    this.rows.replaceChildren(...kind === 'noul'
      ? [this.#yesNo('yes'), this.#yesNo('no')] : options.map((_, i) => this.#option(i)));
    this.adder.hidden = kind === 'noul';
    this.adder.textContent = isScore ? 'Add a level' : 'Add an option';
    this.adder.disabled = options.length >= MOST_OPTIONS;
    this.meanings.hidden = isScore; // a level is its own description
    const count = meanings(this.question); // they are asked with, hidden or not
    this.meanings.textContent = count ? `Descriptions (${count})` : 'Descriptions';
    this.meanings.setAttribute('aria-pressed', String(this.isExplained));
    this.show(this.answer?.type === kind ? this.answer : null);
  }

  #yesNo(name) {
    const label = el('span', { class: 'name' }, name === 'yes' ? 'Yes' : 'No');
    const meaning = () => this.#field(`Meaning of ${name}`, name, this.question, 'what it means');
    return this.#row(label, '', meaning);
  }

  #option(i) {
    const one = this.question.options[i];
    const what = this.question.kind === 'score' ? `Level ${i}` : `Option ${i + 1}`;
    const input = this.#field(what, 'name', one, what);
    input.addEventListener('keydown', (event) => this.#onKey(event, i));
    const remove = button('✕', () => this.#drop(i),
      { class: 'quiet remove', 'aria-label': `Remove ${what.toLowerCase()}`, title: 'Remove' });
    const meaning = () => this.#field(`Meaning of ${what.toLowerCase()}`, 'meaning', one, 'what it means');
    return this.#row(input, remove, meaning);
  }

  #row(label, remove, meaning) {
    const bar = el('i', { class: 'bar' });
    const number = el('span', { class: 'number' });
    const isExplained = this.isExplained && this.question.kind !== 'score';
    const row = el('li', { class: 'row' }, label, el('span', { class: 'track' }, bar), number, remove,
      ...isExplained ? [meaning()] : []);
    if (isExplained) row.lastChild.classList.add('meaning');
    this.#bars.push({ bar, number, row });
    return row;
  }

  /** Enter goes to the next option, and makes it where there is none; Backspace in an empty one removes it. */
  #onKey(event, i) {
    if (event.isComposing) return;
    const { options } = this.question;
    if (event.key === 'Enter') {
      event.preventDefault();
      if (i + 1 < options.length) this.#focusRow(i + 1);
      else this.#add(i + 1);
    }
    if (event.key === 'Backspace' && !event.target.value && options.length > 1) {
      event.preventDefault();
      this.#drop(i);
    }
  }

  /** An input that writes into a part of the question. */
  #field(label, name, into, placeholder, tag = 'input') {
    const field = el(tag, { 'aria-label': label, placeholder, autocomplete: 'off', maxlength: 20000 });
    if (tag === 'input') field.type = 'text';
    field.value = into[name];
    field.addEventListener('input', () => { into[name] = field.value; this.onChange(); });
    return field;
  }
}
