// The dialog with the Decide view's call as a program. Knows the languages of code.js, and not what
// is asked.

import { button } from '../dom.js';
import { LANGUAGES } from './code.js';

export class ProgramDialog {
  #call = null; // { url, body, hasKey }
  #language = Object.keys(LANGUAGES)[0];

  constructor(dialog) {
    this.dialog = dialog;
    this.code = dialog.querySelector('code');
    this.tabs = Object.keys(LANGUAGES).map((name) =>
      button(name, () => this.#draw(name), { class: 'quiet tab', 'data-language': name }));
    dialog.querySelector('nav').append(...this.tabs);
    this.copy = dialog.querySelector('.strong');
    this.copy.addEventListener('click', () => this.#copy());
  }

  /** url: of the route; body: a value of literal.js; hasKey: whether the server wants a key. */
  open(url, body, hasKey) {
    this.#call = { url, body, hasKey };
    this.#draw(this.#language);
    this.dialog.showModal();
  }

  #draw(language) {
    this.#language = language;
    const { url, body, hasKey } = this.#call;
    this.code.textContent = LANGUAGES[language](url, body, hasKey);
    this.copy.textContent = 'Copy';
    for (const tab of this.tabs) tab.setAttribute('aria-pressed', String(tab.dataset.language === language));
  }

  /** A browser gives pages of other machines without TLS no clipboard: then the text is selected. */
  async #copy() {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
      this.copy.textContent = 'Copied';
    } catch {
      getSelection().selectAllChildren(this.code);
      this.copy.textContent = 'Selected: copy it with the keyboard';
    }
  }
}
