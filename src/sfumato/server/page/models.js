// The choice between the models of a server that has several, of which one is loaded at a time. Knows its
// element; what loads a model is given.

import { el } from './dom.js';

export class Models {
  #select;
  #load;

  /** select: the element; load(name): has a model loaded, and resolves when it is, or when that failed. */
  constructor(select, load) {
    this.#select = select;
    this.#load = load;
    select.addEventListener('change', () => this.#choose());
  }

  /** Shows all models, of which one is loaded; returns that one, undefined where there is no choice. */
  meet(loaded, names = []) {
    const isChoice = names.length > 1;
    this.#select.replaceChildren(...isChoice ? names.map((name) => el('option', { value: name }, name)) : []);
    this.#select.value = loaded;
    this.#select.hidden = !isChoice;
    return isChoice ? loaded : undefined;
  }

  async #choose() {
    this.#select.setAttribute('aria-busy', 'true');
    this.#select.disabled = true;
    await this.#load(this.#select.value);
    this.#select.disabled = false;
    this.#select.removeAttribute('aria-busy');
    // Disabled, it lost the focus; who writes a question meanwhile keeps it.
    if (document.activeElement === document.body) this.#select.focus();
  }
}
