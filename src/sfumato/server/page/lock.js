// The field for the API key, in the place of the page's views while the server refuses what the page
// sends. Knows its form, and neither the server nor where the key is kept.

export class Lock {
  #field;
  #problem;

  /** element: the view; onKey(key) is called with each key that is entered. */
  constructor(element, { onKey }) {
    this.element = element;
    this.#field = element.querySelector('input');
    this.#problem = element.querySelector('.problem');
    element.querySelector('form').addEventListener('submit', (event) => {
      event.preventDefault();
      const key = this.#field.value.trim();
      if (/^[\x20-\x7e]+$/.test(key)) onKey(key);
      else this.#say(key ? 'A key has characters of ASCII alone.' : 'Enter the key.');
    });
  }

  get isClosed() { return !this.element.hidden; }

  /** The server has refused the page; isWrong: a key was sent. */
  close(isWrong) {
    document.querySelectorAll('dialog[open]').forEach((dialog) => dialog.close());
    this.element.hidden = false;
    document.body.classList.add('is-locked');
    this.#say(isWrong ? 'The server refuses this key. Correct it, and open again.' : '');
    this.#field.focus();
    this.#field.select();
  }

  open() {
    this.element.hidden = true;
    document.body.classList.remove('is-locked');
    this.#field.value = '';
    this.#say('');
  }

  #say(text) {
    this.#problem.textContent = text;
    this.#problem.hidden = !text;
    if (text) this.#field.setAttribute('aria-invalid', 'true');
    else this.#field.removeAttribute('aria-invalid');
  }
}
