// The Decide view: a state, questions about it, and answers that follow what is typed. Knows what stands
// in the view, keeps it, and says when to ask; asking.js asks.

import { button, el } from '../dom.js';
import { ServerError, capital } from '../errors.js';
import { picturesIn, Tray } from '../pictures.js';
import { loadDecision, saveDecision } from '../store.js';
import { Asking, askable, bodyOf } from './asking.js';
import { Card } from './card.js';
import { isUnsure } from './figures.js';
import { ProgramDialog } from './program.js';
import { KINDS, MOST_QUESTIONS, blank, fromStorage, fromWire } from './questions.js';
import { Reads } from './reads.js';

const PATH = 'v1/systemone';
const WAYS = ['samples', 'orders', 'order', 'verify']; // of reading: names of the selects, and after x_ of fields

export class Decide {
  #cards = [];
  #examples = [];
  #before = null; // what stood here before an example came or a question was removed
  #isOpen = false;
  #mostPictures = 0; // 0: the model reads none
  #isTouched = false; // whether it is the person's own, and no example
  #reads = new Reads((signal) => this.#read(signal));

  /** element: the view; decide(body, signal): the server's answer; hasKey(): whether a key is set. */
  constructor(element, { decide, hasKey }) {
    this.asking = new Asking(decide, () => this.#look());
    const part = (name) => element.querySelector(`#decide-${name}`);
    Object.assign(this, {
      state: element.querySelector('#state'), list: part('questions'), note: part('note'),
      problem: part('problem'), status: part('status'), unfit: part('unfit'), chips: part('examples'),
      ways: WAYS.map((name) => element.querySelector(`select[name="${name}"]`)), code: part('code'),
    });
    this.tray = new Tray(part('tray'), () => this.#mostPictures, { onChange: () => this.#changed() });
    this.attach = part('attach');
    for (const input of this.attach.querySelectorAll('input')) {
      input.addEventListener('change', () => { this.give([...input.files]); input.value = ''; });
    }
    this.state.addEventListener('paste', (event) => {
      const files = this.#mostPictures ? picturesIn(event.clipboardData) : [];
      if (!files.length) return;
      event.preventDefault();
      this.give(files);
    });
    this.program = new ProgramDialog(document.querySelector('#program'));
    for (const field of [this.state, ...this.ways]) field.addEventListener('input', () => this.#changed());
    part('adders').append(...Object.entries(KINDS).map(([kind, name]) => button(name, () => this.#add(kind))));
    this.adders = [...part('adders').querySelectorAll('button')];
    this.code.addEventListener('click', () => {
      const { state, cards, way, pictures } = this.#look();
      const named = pictures.map(({ name }, i) => ({ id: i + 1, url: `,the base64 of ${name}` }));
      this.program.open(new URL(PATH, document.baseURI).href, bodyOf(state, askable(cards), way, named), hasKey());
    });
    part('again').addEventListener('click', () => this.#reads.now());
    const stored = loadDecision();
    if (stored) this.#restore(stored);
    else this.#show({ state: '', questions: [] });
  }

  /** What /props says of decisions: { note, examples: [{ title, state, questions }] }; and how many pictures
      a request may have, 0 where the model reads none. */
  meet(decisions, mostPictures) {
    this.#mostPictures = mostPictures;
    this.attach.hidden = !mostPictures;
    const images = mostPictures ? '' : '; this model reads no images';
    this.state.placeholder = `the text that the questions are about${images}`;
    this.note.textContent = decisions?.note ?? '';
    this.note.hidden = !this.note.textContent;
    this.#examples = decisions?.examples ?? [];
    const [first] = this.#examples;
    if (first && !this.#isTouched && !this.#cards.length) this.#show(unpacked(first));
    this.#drawChips();
    if (this.#isOpen) this.#reads.now();
  }

  /** Adds pictures to the state. */
  async give(files) {
    if (this.#mostPictures) await this.tray.add(files);
  }

  /** Whether the view is seen; it asks nothing while it is not. */
  watch(isOpen) {
    this.#isOpen = isOpen;
    if (isOpen) this.#reads.now();
    else this.#reads.stop();
  }

  // What stands in it

  #restore({ state, questions, ways, pictures }) {
    this.#isTouched = true;
    this.ways.forEach((field) => {
      if ([...field.options].some(({ value }) => value === ways?.[field.name])) field.value = ways[field.name];
    });
    const list = Array.isArray(questions) ? questions.slice(0, MOST_QUESTIONS) : [];
    this.#show({ state: String(state ?? ''), questions: list.map(fromStorage).filter(Boolean), pictures });
  }

  #content() {
    return {
      state: this.state.value, questions: structuredClone(this.#cards.map(({ question }) => question)),
      ways: Object.fromEntries(this.ways.map(({ name, value }) => [name, value])),
    };
  }

  /** The same with its pictures, which are not kept over a visit. */
  #whole() { return { ...this.#content(), pictures: this.tray.pictures }; }

  #show({ state, questions, pictures = [] }) {
    this.state.value = state;
    this.tray.pictures = pictures;
    this.#cards = questions.map((question) => this.#card(question));
    this.list.replaceChildren(...this.#cards.map(({ element }) => element));
    this.#count();
  }

  #card(question) {
    return new Card(question, { onChange: () => this.#changed(), onRemove: (card) => this.#remove(card) });
  }

  #add(kind) {
    const card = this.#card(blank(kind));
    this.#cards.push(card);
    this.list.append(card.element);
    this.#count();
    this.#changed();
    card.focus();
  }

  #remove(card) {
    this.#before = this.#whole();
    const at = this.#cards.indexOf(card);
    this.#cards.splice(at, 1);
    card.element.remove();
    this.#count();
    this.#drawChips();
    this.#changed();
    (this.#cards[at] ?? this.#cards.at(-1) ?? this.adders[0]).focus();
  }

  #count() {
    this.#cards.forEach((card, i) => { card.number = i + 1; });
    for (const adder of this.adders) adder.disabled = this.#cards.length >= MOST_QUESTIONS;
  }

  #drawChips() {
    const undo = this.#before && button('Undo', () => {
      const before = this.#before;
      this.#before = null;
      this.#restore(before);
      this.#drawChips();
      this.#changed();
      this.state.focus();
    });
    this.chips.replaceChildren(...[
      ...this.#examples.map((example) => button(example.title, () => this.#try(example))), ...undo ? [undo] : [],
    ].map((chip) => el('li', {}, chip)));
  }

  #try(example) {
    this.#before = this.#whole();
    this.#show(unpacked(example));
    this.#drawChips();
    this.#changed();
  }

  // Asking

  /** What is to be asked. A way of reading that is the server's own choice is left out, and pictures come
      before all questions. */
  #look() {
    const { pictures } = this.tray;
    const chosen = this.ways.filter(({ value, disabled }) => !disabled && !['state', '1', 'none'].includes(value));
    const way = chosen.map(({ name, value }) => [`x_${name}`, Number(value) || value]);
    return { cards: this.#cards, state: this.state.value, pictures, way: Object.fromEntries(way) };
  }

  #changed() {
    this.#isTouched = true;
    saveDecision(this.#content());
    this.#mark();
    this.#reads.later();
  }

  #mark() {
    this.ways.find(({ name }) => name === 'order').disabled = Boolean(this.tray.pictures.length);
    this.asking.mark();
    this.code.disabled = !askable(this.#cards).length;
  }

  async #read(signal) {
    this.#mark();
    if (!this.#isOpen) return;
    const start = performance.now();
    try {
      this.#report(await this.asking.ask(signal), performance.now() - start);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ServerError)) console.warn(error);
      this.#fail(error);
    }
  }

  #report(usage, ms) {
    this.problem.hidden = true;
    if (usage) {
      const { x_reads: reads, input_tokens: tokens, x_cached_tokens: cached } = usage;
      const count = (number, one) => `${number.toLocaleString()} ${one}${number === 1 ? '' : 's'}`;
      this.status.textContent = `${count(reads, 'read')} in ${Math.round(ms)} ms · `
        + `${count(tokens, 'token')}, ${cached.toLocaleString()} from the cache`;
    }
    const answers = this.#cards.map(({ answer }) => answer).filter(Boolean);
    this.unfit.hidden = answers.length < 2 || !answers.every(isUnsure); // then cards need not say it
  }

  #fail(error) {
    this.problem.querySelector('span').textContent = `${capital(error.message)} `;
    this.problem.hidden = false;
  }
}

const unpacked = ({ state, questions }) => ({ state, questions: Object.values(questions).map(fromWire) });
