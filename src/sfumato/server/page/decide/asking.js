// Asks the server about cards, and shows what it answers on them. Every question is read by itself, so
// an answer holds as long as its own question, the state and the way of reading are the same: only
// cards whose answer does not hold are asked. Knows cards, and no view around them.

import { capital } from '../errors.js';
import { json } from './literal.js';
import { idsOf, isComplete, missingIn, toWire, wrongIn } from './questions.js';

/** Cards whose question can be asked. */
export const askable = (cards) => cards.filter(({ question }) => isComplete(question));

/** The body of a request, as literal.js has values; way: fields that say how to read; pictures: of the state. */
export function bodyOf(state, cards, way, pictures = []) {
  const ids = idsOf(cards.map(({ question }) => question));
  const questions = new Map(cards.map(({ question }, i) => [ids[i], toWire(question)]));
  const assets = new Map(pictures.map((picture) => [mark(picture), { type: 'image', data_base64: base64(picture) }]));
  return { state: shown(state, pictures), ...pictures.length ? { assets } : {}, questions, ...way };
}

/** Stands in a state for a picture. */
const mark = ({ id }) => `<image:${id}>`;
const base64 = ({ url }) => url.slice(url.indexOf(',') + 1);
const shown = (state, pictures) => (pictures.length ? [...pictures.map(mark), state].join('\n').trim() : state);

export class Asking {
  /** decide(body, signal): the server's; look(): { cards, state, pictures, way }, as they are at that moment. */
  constructor(decide, look) { Object.assign(this, { decide, look }); }

  /** Shows on every card whether its answer still holds, and what is wrong with its question. */
  mark() {
    for (const card of this.look().cards) {
      const key = this.#key(card);
      if (card.refused?.key !== key) card.refused = null;
      const wrong = wrongIn(card.question) || card.refused?.words || '';
      if (wrong || !isComplete(card.question)) { card.key = ''; card.show(null); }
      card.complain(wrong, missingIn(card.question));
      card.isStale = card.key !== key;
    }
  }

  /**
   * Asks what is to be asked; the usage of the reply, null where there was none. A question that the
   * server refuses gets the words on its card, and the others are asked without it. Raises ServerError
   * for everything else, and what `fetch` raises after an abort.
   */
  async ask(signal) {
    for (;;) {
      const cards = askable(this.look().cards).filter((card) => card.key !== this.#key(card) && !card.refused);
      if (!cards.length) return null;
      const usage = await this.#request(cards, signal);
      if (usage) return usage;
    }
  }

  /** What an answer depends on, and nothing else. */
  #key({ question }) {
    const { state, pictures, way } = this.look();
    return json([shown(state, pictures), toWire(question), way]);
  }

  /** The usage; null where the server refused one of the questions. */
  async #request(cards, signal) {
    const keys = cards.map((card) => this.#key(card));
    const { state, pictures, way } = this.look();
    const body = bodyOf(state, cards, way, pictures);
    const ids = [...body.questions.keys()];
    let reply;
    try {
      reply = await this.decide(json(body), signal);
    } catch (error) {
      const blamed = signal.aborted ? -1 : questionOf(error, ids);
      if (blamed < 0) throw error;
      cards[blamed].refused = { key: keys[blamed], words: wordsOf(error, ids[blamed]) };
      this.mark();
      return null;
    }
    signal.throwIfAborted();
    cards.forEach((card, i) => {
      if (keys[i] !== this.#key(card)) return; // the answer is out of date
      card.key = keys[i];
      card.show(reply.answers[ids[i]] ?? null);
      card.isStale = false;
    });
    return reply.usage;
  }
}

/** Which of the questions an error is about; -1: none of them alone. */
function questionOf({ status, place, message }, ids) {
  if (!status || status === 401 || status === 403) return -1;
  const [field, id] = place ?? [];
  if (field === 'questions' && id !== undefined) return ids.indexOf(String(id));
  return ids.findIndex((one) => message.startsWith(`${one}: `) || message.startsWith(`questions.${one}: `));
}

/** The error without the question's id, which a card does not show. */
function wordsOf({ message, place }, id) {
  const part = (place ?? []).slice(3).filter((step) => step !== 'criteria').join(', ');
  const words = message.replace(`questions.${id}: `, '').replace(`${id}: `, '');
  return capital(part ? `${part}: ${words}` : words);
}
