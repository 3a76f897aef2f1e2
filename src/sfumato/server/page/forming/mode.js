// What the modes Fill, JSON and Edit have in common: a form on one side, the stage on the other,
// examples, one run at a time, errors beside the field that they are about, and what is kept across a
// reload. Knows no mode.

import { button, el } from '../dom.js';
import { ServerError, capital } from '../errors.js';
import { summary } from '../footer.js';
import { drawSeed, paced } from '../pace.js';
import { loadMode, saveMode } from '../store.js';
import { Stage } from './stage.js';

/** What is wrong with a field of the form, in words. */
export class Wrong extends Error {
  constructor(field, words) { super(words); this.field = field; }
}

export class Mode {
  #running = null; // AbortController
  #before = null; // what stood here before an example came, or a change was accepted
  #examples = [];
  #isTouched = false; // whether it is the person's own, and no example

  /** blame: names of a request's fields → the names of the form's fields that errors about them are shown at. */
  constructor(element, { settings, hint, blame }) {
    Object.assign(this, { element, settings, blame });
    this.form = element.querySelector('form');
    this.fields = [...this.form.elements].filter((field) => field.name);
    this.stage = new Stage(element.querySelector('.stage'), { hint, pace: () => settings.pace.replay });
    this.note = element.querySelector('.model-note');
    this.chips = element.querySelector('.chips');
    this.runButton = this.form.querySelector('[type="submit"]');
    this.stopButton = this.form.querySelector('.stop');
    this.stopButton.addEventListener('click', () => this.stop());
    this.form.addEventListener('submit', (event) => { event.preventDefault(); this.run(); });
    this.form.addEventListener('input', (event) => this.changed(event.target.name));
    this.form.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.run(); }
    });
    element.addEventListener('keydown', (event) => { if (event.key === 'Escape') this.stop(); });
  }

  /** Shows what was kept; called once the mode is whole. */
  restore() {
    const kept = loadMode(this.element.id);
    this.#isTouched = kept !== null;
    if (kept) this.values = kept;
  }

  /** What /props says of the mode: { note, examples }. */
  meet({ note, examples }) {
    this.note.textContent = note ?? '';
    this.note.hidden = !note;
    this.#examples = examples;
    if (!this.#isTouched && examples.length) this.values = this.fromExample(examples[0]);
    this.#drawChips();
  }

  get isRunning() { return this.#running !== null; }

  stop() { this.#running?.abort(); }

  /** What stands in the form, by the names of its fields. */
  get values() { return Object.fromEntries(this.fields.map(({ name, value }) => [name, value])); }

  set values(values) {
    for (const field of this.fields) {
      if (typeof values[field.name] === 'string') field.value = values[field.name];
    }
    this.complain();
  }

  /** The first field that is shown. */
  get firstField() {
    return [...this.form.elements].find((field) => field.matches('textarea, input') && field.offsetParent);
  }

  /** Something was written into a field. */
  changed(name) {
    this.#isTouched = true;
    if (this.#problem(name)) this.#problem(name).hidden = true;
    saveMode(this.element.id, this.values);
  }

  /** Replaces what stands in the form; `undo` brings it back. */
  replace(values) {
    this.#before = this.values;
    this.values = values;
    this.changed();
    this.#drawChips();
  }

  get canUndo() { return this.#before !== null; }

  undo() {
    const before = this.#before;
    this.#before = null;
    this.values = before;
    this.changed();
    this.#drawChips();
    this.firstField.focus();
  }

  /** Shows what is wrong beside its field, and nothing beside the others. */
  complain(name = null, words = '') {
    for (const problem of this.form.querySelectorAll('.problem')) {
      const isIt = name !== null && problem === (this.#problem(name) ?? this.#problem(''));
      problem.textContent = isIt ? words : '';
      problem.hidden = !isIt;
    }
  }

  async run() {
    if (this.isRunning) return;
    this.complain();
    const running = new AbortController();
    const { signal } = running;
    this.#show(running);
    const fields = { ...this.settings.samplingFields };
    fields.seed ??= drawSeed();
    const record = { content: '', seed: fields.seed };
    let isBegun = false; // else the stage keeps what it shows
    try {
      const { frames, stage, end } = await this.request(fields, signal);
      this.stage.begin(stage);
      isBegun = true;
      for await (const frame of paced(frames, this.stage, this.settings, signal)) take(frame, record);
      this.stage.end({ stats: summary(record), ...end(record) });
    } catch (error) {
      if (isBegun) this.stage.end(signal.aborted
        ? { stats: ['stopped'], note: 'Stopped: a draft, and not the whole text.' } : { stats: ['ended by an error'] });
      if (!signal.aborted) this.#fail(error);
    }
    this.#show(null);
  }

  #show(running) {
    this.#running = running;
    const [shown, hidden] = running ? [this.stopButton, this.runButton] : [this.runButton, this.stopButton];
    const hasFocus = document.activeElement === hidden;
    shown.hidden = false;
    hidden.hidden = true;
    if (hasFocus) shown.focus();
  }

  #fail(error) {
    if (error instanceof Wrong) this.complain(error.field, error.message);
    else if (error instanceof ServerError) {
      const field = this.blame[error.place?.[0]] ?? '';
      const words = field ? error.message.replace(/^[\w.[\]-]+: /, '') : error.message;
      this.complain(field, capital(words));
    } else {
      this.complain('', 'The connection broke off.');
      console.warn(error);
    }
    this.form.querySelector('.problem:not([hidden])')?.scrollIntoView({ block: 'nearest' });
  }

  #problem(name) { return this.form.querySelector(`.problem[data-for="${name}"]`); }

  #drawChips() {
    const chips = this.#examples.map((example) => button(example.title, () => {
      this.stop();
      this.replace(this.fromExample(example));
    }));
    if (this.#before) chips.push(button('Undo', () => this.undo()));
    this.chips.replaceChildren(...chips.map((chip) => el('li', {}, chip)));
  }
}

/** Takes a frame of a chat completion or of a fill into a record. */
function take(frame, record) {
  const choice = frame.choices?.[0];
  record.content += choice?.delta?.content ?? frame.text ?? '';
  if (choice?.finish_reason) record.finish = choice.finish_reason;
  for (const name of ['timings', 'warnings', 'usage', 'holes']) if (frame[name]) record[name] = frame[name];
}
