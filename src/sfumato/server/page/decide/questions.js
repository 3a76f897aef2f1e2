// Questions as the Decide view holds them, and as System One's wire has them. Knows no DOM and no
// server. A question is { kind, instructions, yes, no, options: [{ name, meaning }] }: all parts are
// kept when the kind changes, so that a choice becomes a score and back without loss.

export const KINDS = { noul: 'Yes or no', choice: 'Choice', score: 'Score' };
export const MOST_QUESTIONS = 50, MOST_OPTIONS = 255; // the second is the server's

const ID_LENGTH = 32;

/** An empty question of a kind. */
export function blank(kind) {
  return { kind, instructions: '', yes: '', no: '', options: [option(), option()] };
}

export const option = (name = '', meaning = '') => ({ name, meaning });

/** The question of the wire's `{ type, instructions, criteria }`. */
export function fromWire({ type, instructions = '', criteria }) {
  const question = { ...blank(type), instructions };
  if (type === 'noul') return { ...question, yes: criteria?.true ?? '', no: criteria?.false ?? '' };
  const options = type === 'score' ? criteria.map((level) => option(level))
    : Object.entries(criteria).map(([name, meaning]) => option(name, meaning ?? ''));
  return { ...question, options };
}

/** The same where it comes from storage, whose contents may be anything; null for no question. */
export function fromStorage(value) {
  if (!Object.hasOwn(KINDS, value?.kind)) return null;
  const text = (part) => typeof part === 'string' ? part : '';
  const options = Array.isArray(value.options) ? value.options.slice(0, MOST_OPTIONS) : [];
  return {
    kind: value.kind, instructions: text(value.instructions), yes: text(value.yes), no: text(value.no),
    options: options.map((one) => option(text(one?.name), text(one?.meaning))),
  };
}

/** Options or levels that have a name: a row that is still empty is not asked about. */
export const named = ({ options }) => options.filter(({ name }) => name.trim());

/** How many of the answers have a description. */
export const meanings = ({ kind, yes, no, options }) =>
  (kind === 'noul' ? [yes, no] : options.map(({ meaning }) => meaning)).filter((text) => text.trim()).length;

/** What is still to be written, in words; '' where nothing is. */
export function missingIn(question) {
  const { kind, instructions, yes, no } = question;
  if (kind === 'noul') {
    return [instructions, yes, no].some((text) => text.trim()) ? '' : 'Write the question.';
  }
  if (named(question).length) return '';
  return kind === 'score' ? 'Name at least one level.' : 'Name at least one option.';
}

/** What is wrong, in words; '' where nothing is. */
export function wrongIn(question) {
  const names = question.kind === 'choice' ? named(question).map(({ name }) => name.trim()) : [];
  const twice = names.find((name, i) => names.indexOf(name) < i);
  return twice ? `Two options have the name “${twice}”. Rename one of them.` : '';
}

/** Whether the question can be asked. */
export const isComplete = (question) => !missingIn(question) && !wrongIn(question);

/** The question as the wire has it. Options are a Map: an object moves names such as "10" first. */
export function toWire(question) {
  const { kind, instructions } = question;
  const wire = { type: kind };
  if (instructions.trim()) wire.instructions = instructions.trim();
  if (kind === 'score') wire.criteria = named(question).map(({ name }) => name.trim());
  if (kind === 'choice') {
    wire.criteria = new Map(named(question).map(({ name, meaning }) => [name.trim(), meaning.trim() || null]));
  }
  const [yes, no] = [question.yes.trim(), question.no.trim()];
  if (kind === 'noul' && (yes || no)) wire.criteria = { ...(yes && { true: yes }), ...(no && { false: no }) };
  return wire;
}

/** An id for each question, for people: ids do not reach the model. */
export function idsOf(questions) {
  const taken = new Set();
  return questions.map(({ kind, instructions }, i) => {
    const words = instructions.toLowerCase().match(/[a-z0-9]+/g)?.join('_').slice(0, ID_LENGTH);
    const base = /^[a-z]/.test(words ?? '') ? words.replace(/_$/, '') : `${kind === 'noul' ? 'yes_no' : kind}_${i + 1}`;
    let id = base;
    for (let n = 2; taken.has(id); n++) id = `${base}_${n}`;
    taken.add(id);
    return id;
  });
}

/** The probability of each row: yes and no, or an option; null for a row that was not asked about. */
export function probabilities(question, answer) {
  if (question.kind === 'noul') return [answer.noul, 1 - answer.noul];
  const asked = named(question);
  return question.options.map((one) => {
    const index = asked.indexOf(one);
    if (index < 0) return null;
    return answer.probabilities[question.kind === 'score' ? index : one.name.trim()] ?? null;
  });
}
