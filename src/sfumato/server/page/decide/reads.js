// When the Decide view asks the server: a moment after the last key, and at the latest some time
// after the first, so that answers move while a person types. A new read aborts the one before.
// Knows neither questions nor answers.

const PAUSE_MS = 180, LATEST_MS = 700;

export class Reads {
  #timer = null;
  #due = 0; // when the changes that wait are read at the latest; 0: nothing waits
  #running = null; // AbortController

  /** read(signal): one read, which looks by itself at what there is to be asked. */
  constructor(read) { this.read = read; }

  /** Something has changed. */
  later() {
    const now = performance.now();
    this.#due ||= now + LATEST_MS;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.now(), Math.min(PAUSE_MS, Math.max(0, this.#due - now)));
  }

  now() {
    this.stop();
    const running = new AbortController();
    this.#running = running;
    this.read(running.signal);
  }

  /** Ends the read that runs, and forgets the one that waits. */
  stop() {
    clearTimeout(this.#timer);
    this.#due = 0;
    this.#running?.abort();
    this.#running = null;
  }
}
