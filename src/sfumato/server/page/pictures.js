// Pictures and text files that a person gives with a question: chosen, dropped, pasted or photographed, and
// shown above the box until they are sent, or beside the state of the Decide view. Knows files and elements, and no server.

import { button, el, newId } from './dom.js';
import { MOST_FILES, sizeOf, textFileOf } from './text_files.js';
import { harmless } from './tokens.js';

const SENT_AS_THEY_ARE = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp'];
const MOST_BYTES = 1_000_000; // of a file; a larger one is drawn again, at LARGE pixels a side at most
const LARGE = 2048; // more than a model sees of a picture
const SMALL = 320; // a thumbnail

/** A picture of a file: { id, name, url, thumb }, the last two as data URLs. Raises an Error for other files. */
export async function pictureOf(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || 'This'} is no picture that this browser can read.`);
  }
  const kept = file.size <= MOST_BYTES && SENT_AS_THEY_ARE.includes(file.type);
  return {
    id: newId(),
    name: file.name || 'picture',
    url: kept ? await urlOf(file) : drawn(bitmap, LARGE, 0.92),
    thumb: drawn(bitmap, SMALL, 0.85),
  };
}

function urlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} could not be read.`));
    reader.readAsDataURL(file);
  });
}

/** The picture as a JPEG, on white, its longer side of `most` pixels at most. */
function drawn(bitmap, most, quality) {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const side = (pixels) => Math.max(1, Math.round(pixels * scale));
  const canvas = el('canvas', { width: side(bitmap.width), height: side(bitmap.height) });
  const context = canvas.getContext('2d');
  context.fillStyle = '#fff';
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/jpeg', quality);
}

/** The pictures and files above the box. */
export class Tray {
  #pictures = [];
  #files = [];
  #list;
  #problem;

  /** element: where they are shown; most(): how many pictures a question may have, 0 where the model reads none;
   *  takesFiles: whether text files are taken; onChange(): others are in it. */
  constructor(element, most, { takesFiles = false, onChange = () => {} } = {}) {
    Object.assign(this, { most, takesFiles, onChange });
    this.#list = el('ul', { class: 'pictures', 'aria-label': takesFiles ? 'Attachments' : 'Pictures of the question' });
    this.#problem = el('p', { class: 'note', role: 'alert', hidden: true });
    this.element = element;
    element.append(this.#list, this.#problem);
  }

  /** Adds pictures and files: of those that cannot be taken, says why. */
  async add(files) {
    this.#say('');
    for (const file of files) {
      try {
        if (this.takesFiles && !file.type.startsWith('image/')) await this.#addFile(file);
        else await this.#addPicture(file);
      } catch (error) {
        this.#say(error.message);
      }
      this.#draw();
      this.onChange();
    }
  }

  async #addPicture(file) {
    if (!this.most()) throw new Error('This model reads no pictures.');
    if (this.#pictures.length >= this.most()) throw new Error(`A question has ${this.most()} pictures at most.`);
    this.#pictures.push(await pictureOf(file));
  }

  async #addFile(file) {
    if (this.#files.length >= MOST_FILES) throw new Error(`A question has ${MOST_FILES} files at most.`);
    this.#files.push(await textFileOf(file));
  }

  /** The pictures, each with an id of its own. */
  get pictures() { return this.#pictures; }

  set pictures(pictures) {
    this.#pictures = pictures;
    this.#say('');
    this.#draw();
  }

  /** The pictures and files, which are gone from here. */
  take() {
    const taken = { pictures: this.#pictures, files: this.#files };
    this.#files = [];
    this.pictures = [];
    return taken;
  }

  #say(text) {
    this.#problem.textContent = text;
    this.#problem.hidden = !text;
  }

  #draw() {
    const without = (items, one) => items.filter((other) => other !== one);
    const remove = (name, onClick) => button('✕', () => { onClick(); this.#draw(); this.onChange(); }, { 'aria-label': `Remove ${name}` });
    this.#list.replaceChildren(
      ...this.#pictures.map((picture) => el('li', {}, el('img', { src: picture.thumb, alt: picture.name }),
        remove(picture.name, () => { this.#pictures = without(this.#pictures, picture); }))),
      ...this.#files.map((file) => el('li', { class: 'file' }, el('span', {}, harmless(file.name)),
        el('span', { class: 'dim' }, sizeOf(new Blob([file.text]).size)),
        remove(file.name, () => { this.#files = without(this.#files, file); }))));
  }
}

/** The files among what was dropped or pasted. */
export const filesIn = (transfer) => [...transfer?.files ?? []];

/** The pictures among them. */
export const picturesIn = (transfer) =>
  filesIn(transfer).filter(({ type }) => type.startsWith('image/'));

/** A message's content: a text, or parts of pictures and a text. */
export function contentOf(text, pictures = []) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url, thumb }) => ({ type: 'image_url', image_url: { url: url ?? thumb } }));
  return text ? [...parts, { type: 'text', text }] : parts;
}

/** Text and pictures of a message's content. */
export function partsOf(content) {
  if (typeof content === 'string') return { text: content, pictures: [] };
  const pictures = content.filter(({ type }) => type === 'image_url')
    .map(({ image_url: { url } }) => ({ name: 'picture', url, thumb: url }));
  return { text: content.filter(({ type }) => type === 'text').map(({ text }) => text).join(''), pictures };
}
