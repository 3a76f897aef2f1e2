// The list of conversations: search, open, rename, delete with undo, export and import. Knows what is kept
// (store.js) and how it is written to files (archive.js); the conversation that is shown is chat.js's.

import { MOST_BYTES, readArchive, written } from './archive.js';
import { titleOf } from './chat.js';
import { button, el, newId } from './dom.js';
import { MOST_CONVERSATIONS, conversations, removeConversation, saveConversation } from './store.js';

const DATE = new Intl.DateTimeFormat('en', { dateStyle: 'medium', timeStyle: 'short' });

export class Conversations {
  #all = [];
  #deleted = null; // { conversation, wasShown }, while it can come back
  #list;
  #search;
  #said;
  #undo;

  /** dialog: the element; chat: shows one of them. */
  constructor(dialog, chat) {
    Object.assign(this, { dialog, chat });
    const part = (name) => dialog.querySelector(`.${name}`);
    this.#list = part('list');
    this.#search = part('search');
    this.#said = part('said-of');
    this.#undo = button('Undo', () => this.#bringBack(), { hidden: true });
    this.#said.after(this.#undo);
    this.#search.addEventListener('input', () => this.#draw());
    part('export-all').addEventListener('click', () => save(conversations(), 'sfumato-conversations.json'));
    part('import').addEventListener('change', ({ target }) => {
      const [file] = target.files;
      target.value = '';
      if (file) this.#import(file);
    });
    part('begin').addEventListener('click', () => { dialog.close(); chat.clear(); });
    dialog.addEventListener('close', () => this.#forget());
  }

  open() {
    this.chat.save();
    this.#search.value = '';
    this.#say('');
    this.#load();
    this.dialog.showModal();
  }

  #load() {
    this.#all = conversations();
    this.dialog.querySelector('.export-all').disabled = !this.#all.length;
    this.#draw();
  }

  #draw() {
    const words = this.#search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#all.filter((one) => {
      const text = `${titleOf(one)} ${one.turns.map(({ content }) => content).join(' ')}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.#list.replaceChildren(...found.map((one) => this.#entry(one)));
    if (!found.length) this.#list.append(el('li', { class: 'dim' }, this.#all.length ? 'None has these words.' : 'None is kept yet.'));
  }

  #entry(one) {
    const title = titleOf(one);
    const count = one.turns.filter(({ role }) => role === 'user').length;
    const facts = `${DATE.format(one.changed)} · ${count} ${count === 1 ? 'question' : 'questions'}`;
    const isShown = one.id === this.chat.id;
    const entry = el('li', {},
      el('button', {
        type: 'button', class: 'open', 'aria-current': isShown ? 'true' : false,
        on: { click: () => { this.dialog.close(); this.chat.open(one.id); } },
      }, el('span', { class: 'title' }, title), el('span', { class: 'dim' }, facts)),
      el('div', { class: 'row' },
        button('Rename', () => this.#rename(one, entry), { 'aria-label': `Rename ${title}` }),
        button('Export', () => save([one], 'sfumato-conversation.json'), { 'aria-label': `Export ${title}` }),
        button('Delete', () => this.#delete(one), { 'aria-label': `Delete ${title}` })));
    return entry;
  }

  #rename(one, entry) {
    const field = el('input', { type: 'text', maxlength: 200, value: titleOf(one), 'aria-label': 'Title' });
    const form = el('form', { class: 'renaming' }, field, el('button', { type: 'submit', class: 'quiet' }, 'Save'));
    const end = () => { this.#load(); this.#list.querySelector('[aria-current], button')?.focus(); };
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      const title = field.value.trim();
      saveConversation({ ...one, title });
      this.chat.renamed(one.id, title);
      end();
    });
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { event.preventDefault(); event.stopPropagation(); end(); }
    });
    entry.replaceChildren(form);
    field.focus();
    field.select();
  }

  #delete(one) {
    this.#deleted = { conversation: one, wasShown: one.id === this.chat.id };
    removeConversation(one.id);
    if (this.#deleted.wasShown) this.chat.leave();
    this.#load();
    this.#say(`“${titleOf(one)}” was deleted.`, true);
    this.#undo.focus();
  }

  #bringBack() {
    const { conversation, wasShown } = this.#deleted;
    saveConversation(conversation);
    if (wasShown && this.chat.isEmpty) this.chat.open(conversation.id);
    this.#forget();
    this.#load();
    this.#say(`“${titleOf(conversation)}” is back.`);
    this.#search.focus();
  }

  #forget() {
    this.#deleted = null;
    this.#undo.hidden = true;
  }

  async #import(file) {
    try {
      if (file.size > MOST_BYTES) throw new Error(`The file has more than ${MOST_BYTES / 1e6} MB.`);
      const found = readArchive(await file.text());
      const kept = found.filter((one) => saveConversation({ ...one, id: newId() })).length;
      const few = kept < found.length
        ? ` There was no room for ${found.length - kept} more: ${MOST_CONVERSATIONS} are kept at most, in some 4 MB.` : '';
      this.#say(`${kept} ${kept === 1 ? 'conversation was' : 'conversations were'} added.${few}`);
    } catch (error) {
      this.#say(error.message);
    }
    this.#load();
  }

  #say(text, canUndo = false) {
    this.#said.textContent = text;
    this.#undo.hidden = !canUndo;
  }
}

/** Has the browser save conversations as a file. */
function save(some, name) {
  const address = URL.createObjectURL(new Blob([written(some)], { type: 'application/json' }));
  Object.assign(document.createElement('a'), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
