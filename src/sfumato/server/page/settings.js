// The settings form: what a request asks for, and how the page looks. Empty fields leave the choice
// to the server, whose defaults stand in them as placeholders. A value that cannot be is refused with
// words below its field, and the value before it holds. Knows no conversation.

import { el } from './dom.js';
import { loadSettings, saveSettings } from './store.js';

const NUMBERS = ['seed', 'max_steps', 'entropy_bound', 'temperature', 'max_tokens'];

// Milliseconds that a draft stays at least, that the drafts of a canvas stay altogether, and that a
// step of a replay stays: drafts of a small model are gone before the eye has seen them.
const PACES = {
  none: { frame: 0, canvas: 0, replay: 120 },
  gentle: { frame: 160, canvas: 1200, replay: 260 },
  slow: { frame: 400, canvas: Infinity, replay: 400 },
};

export class Settings {
  #form;
  #onChange;
  #firm = {}; // the values when a field was last left: half of a refused number is none of them
  #problems = new Map(); // fields with a wrong value → the element of the message
  values;

  /** dialog: the element that holds the form; onChange(values) is called with every change. */
  constructor(dialog, onChange) {
    this.dialog = dialog;
    this.#onChange = onChange;
    this.#form = dialog.querySelector('form');
    this.values = this.#firm = loadSettings();
    this.#fill();
    this.#form.addEventListener('input', (event) => {
      this.#check(event.target);
      this.#keep(this.#read());
    });
    this.#form.addEventListener('change', () => { this.#firm = this.values; });
    this.#form.addEventListener('submit', (event) => {
      const wrong = this.#fields().find((field) => !field.validity.valid);
      if (!wrong) return;
      event.preventDefault();
      wrong.focus();
    });
    dialog.addEventListener('close', () => this.#fill()); // what was refused is gone
    dialog.querySelector('#reset').addEventListener('click', () => this.#reset());
    onChange(this.values);
  }

  /** defaults: name → what the server does where the request does not say; most: name → the most it takes. */
  suggest(defaults, most) {
    for (const field of this.#fields()) {
      if (defaults[field.name] ?? false) field.placeholder = defaults[field.name];
      if (most[field.name] ?? false) field.max = most[field.name];
      // A stored value may be more than this server takes.
      if (!field.validity.valid && !this.dialog.open) field.value = '';
      this.#check(field);
    }
    this.#keep(this.#read());
    this.#firm = this.values;
  }

  /** The fields of a request. */
  get requestFields() {
    const body = {};
    for (const name of NUMBERS) {
      const value = this.values[name] ?? null;
      if (value !== null) body[name] = value;
    }
    if (this.values.thinking) body.chat_template_kwargs = { enable_thinking: true };
    if (this.values.verify) body.verify = 'report';
    return body;
  }

  /** Those of them that say how a canvas is denoised, and not what a chat is. */
  get samplingFields() {
    const { max_tokens: most, chat_template_kwargs: template, verify, ...fields } = this.requestFields;
    return fields;
  }

  /** The system prompt; '' where there is none. */
  get system() { return (this.values.system ?? '').trim(); }

  /** The API key; kept until the tab is closed. */
  get key() { return this.values.key ?? ''; }

  set key(key) {
    this.#form.elements.key.value = key;
    this.#keep({ ...this.values, key });
    this.#firm = this.values;
  }

  /** How long drafts stay: { frame, canvas, replay }, see PACES. */
  get pace() { return PACES[this.values.pace] ?? PACES.gentle; }

  #fields() { return [...this.#form.elements].filter((field) => field.name); }

  #fill() {
    for (const field of this.#fields()) {
      const value = this.values[field.name] ?? null;
      if (field.type === 'checkbox') field.checked = Boolean(value);
      else if (field.tagName === 'SELECT') field.value = value in PACES ? value : 'gentle';
      else field.value = value ?? '';
      this.#check(field);
    }
  }

  #reset() {
    this.values = this.#firm = {};
    this.#fill();
    this.#keep(this.#read());
    this.#form.querySelector('[name]').focus();
  }

  #keep(values) {
    this.values = values;
    saveSettings(values);
    this.#onChange(values);
  }

  /** Says in words what a field may hold, where it holds something else. */
  #check(field) {
    const wrong = !field.validity.valid;
    if (wrong) field.setAttribute('aria-invalid', 'true');
    else field.removeAttribute('aria-invalid');
    let words = this.#problems.get(field);
    if (!words && !wrong) return;
    if (!words) {
      words = el('p', { class: 'problem', id: `${field.name}-problem`, role: 'alert' });
      field.setAttribute('aria-describedby', words.id);
      field.closest('label').after(words);
      this.#problems.set(field, words);
    }
    words.textContent = wrong ? advice(field) : '';
    words.hidden = !wrong;
  }

  #read() {
    const values = {};
    for (const field of this.#fields()) {
      const { name, type, value, validity } = field;
      if (type === 'checkbox') values[name] = field.checked;
      else if (!validity.valid) values[name] = this.#firm[name] ?? null;
      else if (type === 'number') values[name] = value !== '' ? field.valueAsNumber : null;
      else values[name] = value;
    }
    return values;
  }
}

function advice({ min, max, step }) {
  const kind = step === 'any' ? 'a number' : 'a whole number';
  const count = (text) => Number(text).toLocaleString('en');
  const range = max === '' ? `of at least ${count(min)}` : `from ${count(min)} to ${count(max)}`;
  return `Enter ${kind} ${range}, or leave the field empty.`;
}
