// Replays a reply step by step: one slider per message whose last position is the settled text.
// Knows how many frames there are and what to call them, not what is in them.

import { button, el } from './dom.js';

const FRAME_MS = 260;

export class Scrubber {
  #slider;
  #label;
  #play;
  #timer = null;
  #frames = [];

  /** onMove(frame, isLast): frame is { canvas, draft }, or null at the settled text. */
  constructor({ onMove, onHold, onRelease }) {
    this.onMove = onMove;
    this.#slider = el('input', {
      type: 'range', min: 0, max: 0, value: 0, step: 1, disabled: true,
      'aria-label': 'Replay of the denoising, step by step',
      on: { input: () => { this.#stop(); onHold(); this.#moved(); }, blur: () => this.#rest(onRelease) },
    });
    this.#label = el('output', { class: 'where' });
    this.#play = button('▸', () => (this.#timer ? this.#stop() : this.#start(onHold, onRelease)), {
      class: 'quiet play', 'aria-label': 'Play the replay', disabled: true,
    });
    this.element = el('div', { class: 'scrubber' }, this.#play, this.#slider, this.#label);
  }

  /** frames: of the trace; canvases: their number. The slider goes to the settled text. */
  load(frames, canvases) {
    this.#frames = frames;
    this.canvases = canvases;
    this.#slider.max = frames.length;
    this.#slider.value = frames.length;
    this.#slider.disabled = this.#play.disabled = frames.length === 0;
    this.#tell();
  }

  get frame() { return this.#frames[Number(this.#slider.value)] ?? null; }

  /** Goes to a frame of the trace. */
  seek(canvas, draft) {
    const at = this.#frames.findIndex((f) => f.canvas === canvas && f.draft === draft);
    if (at < 0) return;
    this.#slider.value = at;
    this.#moved();
  }

  /** Some steps on or back. */
  shift(by) {
    this.#slider.value = Number(this.#slider.value) + by;
    this.#slider.dispatchEvent(new Event('input'));
  }

  #moved() {
    this.#tell();
    this.onMove(this.frame);
  }

  #tell() {
    const frame = this.frame;
    const where = frame && (this.canvases > 1 ? `canvas ${frame.canvas + 1}, ` : '');
    const text = frame ? `${where}step ${frame.draft + 1}` : 'settled';
    this.#label.textContent = text;
    this.#slider.setAttribute('aria-valuetext', text);
  }

  #start(onHold, onRelease) {
    onHold();
    if (!this.frame) this.#slider.value = 0;
    this.#moved();
    this.#show('❙❙', 'Pause the replay');
    this.#timer = setInterval(() => {
      this.#slider.value = Number(this.#slider.value) + 1;
      this.#moved();
      if (!this.frame) { this.#stop(); this.#rest(onRelease); }
    }, FRAME_MS);
  }

  #stop() {
    clearInterval(this.#timer);
    this.#timer = null;
    this.#show('▸', 'Play the replay');
  }

  #show(sign, label) {
    this.#play.textContent = sign;
    this.#play.setAttribute('aria-label', label);
  }

  #rest(onRelease) { if (!this.frame && !this.#timer) onRelease(); }
}
