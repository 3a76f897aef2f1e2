// Replays a reply step by step: one slider per message whose last position is the settled text.
// Knows how many frames there are and what to call them, not what is in them.

import { button, el } from './dom.js';

export class Scrubber {
  #slider;
  #label;
  #play;
  #timer = null;
  #frames = [];

  /** onMove(frame): frame is { canvas, draft, step }, or null at the settled text; pace(): milliseconds
   *  that a frame is held when the replay plays. */
  constructor({ onMove, onHold, onRelease, pace }) {
    Object.assign(this, { onMove, onHold, onRelease, pace });
    this.#slider = el('input', {
      type: 'range', min: 0, max: 0, value: 0, step: 1, disabled: true,
      'aria-label': 'Replay of the denoising, step by step',
      on: {
        input: () => { this.#stop(); onHold(); this.#moved(); },
        // A key that leaves the slider where it is, as Home at its beginning, holds the replay too.
        keydown: (event) => { if (event.key !== 'Tab') this.#stop(); },
        blur: () => this.#rest(),
      },
    });
    this.#label = el('output', { class: 'where' });
    this.#play = button('▸', () => (this.#timer ? this.#stop() : this.play()), {
      class: 'quiet play', 'aria-label': 'Play the replay', disabled: true,
    });
    this.element = el('div', { class: 'scrubber' }, this.#play, this.#slider, this.#label);
  }

  /** frames: of the trace; canvases: their number; last: what the last position is called. The slider goes there. */
  load(frames, canvases, last = 'settled') {
    this.#frames = frames;
    Object.assign(this, { canvases, last });
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

  /** Goes to the settled text. */
  end() {
    this.#stop();
    this.#slider.value = this.#frames.length;
    this.#tell();
  }

  /** Some steps on or back. */
  shift(by) {
    this.#slider.value = Number(this.#slider.value) + by;
    this.#slider.dispatchEvent(new Event('input'));
  }

  /** From where it stands; from the beginning, where it stands at the end. */
  play() {
    this.onHold();
    if (!this.frame) this.#slider.value = 0;
    this.#moved();
    this.#show('❙❙', 'Pause the replay');
    const next = () => {
      this.#slider.value = Number(this.#slider.value) + 1;
      this.#moved();
      if (this.frame) this.#timer = setTimeout(next, this.pace());
      else { this.#stop(); this.#rest(); }
    };
    this.#timer = setTimeout(next, this.pace());
  }

  #moved() {
    this.#tell();
    this.onMove(this.frame);
  }

  #tell() {
    const frame = this.frame;
    const where = frame && (this.canvases > 1 ? `canvas ${frame.canvas + 1}, ` : '');
    const step = frame && (frame.step ? `step ${frame.step}` : 'noise');
    const text = frame ? where + step : this.last;
    this.#label.textContent = text;
    this.#slider.setAttribute('aria-valuetext', text);
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#show('▸', 'Play the replay');
  }

  #show(sign, label) {
    this.#play.textContent = sign;
    this.#play.setAttribute('aria-label', label);
  }

  #rest() { if (!this.frame && !this.#timer) this.onRelease(); }
}
