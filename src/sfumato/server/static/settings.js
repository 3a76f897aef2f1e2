// The settings form: what a request asks for, and how the page looks. Empty fields leave the choice
// to the server, whose defaults stand in them as placeholders. Knows no conversation.

import { loadSettings, saveSettings } from './store.js';

const NUMBERS = ['seed', 'max_steps', 'entropy_bound', 'temperature', 'max_tokens'];
const GENTLE_MS = 160; // a draft of so small a model is gone before the eye has seen it

export class Settings {
  #form;
  values;

  /** dialog: the element that holds the form; onChange(values) is called with every change. */
  constructor(dialog, onChange) {
    this.dialog = dialog;
    this.#form = dialog.querySelector('form');
    this.values = loadSettings();
    for (const field of this.#fields()) {
      const value = this.values[field.name];
      if (value === undefined || value === null) continue;
      if (field.type === 'checkbox') field.checked = value;
      else field.value = value;
    }
    this.#form.addEventListener('input', () => {
      this.values = this.#read();
      saveSettings(this.values);
      onChange(this.values);
    });
    onChange(this.values);
  }

  /** defaults: name → what the server does where nothing is asked. */
  suggest(defaults) {
    for (const field of this.#fields()) {
      if (defaults[field.name] ?? false) field.placeholder = defaults[field.name];
    }
  }

  /** The fields of a request. */
  get asked() {
    const body = {};
    for (const name of NUMBERS) {
      const value = this.values[name] ?? null;
      if (value !== null) body[name] = value;
    }
    if (this.values.thinking) body.chat_template_kwargs = { enable_thinking: true };
    return body;
  }

  /** How long a draft stays at least, in milliseconds. */
  get pace() { return this.values.gentle ?? true ? GENTLE_MS : 0; }

  #fields() { return [...this.#form.elements].filter((field) => field.name); }

  #read() {
    const values = {};
    for (const field of this.#fields()) {
      const { name, type, value, validity } = field;
      if (type === 'checkbox') values[name] = field.checked;
      else if (type === 'number') values[name] = value !== '' && validity.valid ? field.valueAsNumber : null;
      else values[name] = value;
    }
    return values;
  }
}
