// When the drafts of a stream are shown: each stays for as long as the settings say, since those of a
// small model are gone before the eye has seen them. Knows frames and settings, and no elements.

const SEEDS = 1_000_000; // so many are enough, and short enough to type

/** A seed that the page draws, so that it can show it and send it again. */
export const drawSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;

/**
 * The frames of a stream, each after its drafts were given to a view's `noise`, `draft` and `settle`;
 * change(step): called with each step that changes the view, and calls it.
 */
export async function* paced(frames, view, settings, signal, change = (step) => step()) {
  let waited = 0, next = 0; // drafts of a canvas are held back so long altogether
  const hold = async () => {
    const { frame: held, canvas } = settings.pace;
    const wait = Math.min(next - performance.now(), canvas - waited);
    if (wait > 0) { waited += wait; await pause(wait, signal); }
    next = performance.now() + held;
  };
  for await (const frame of frames) {
    if (frame.draft) {
      if (frame.draft.step === 1) waited = 0;
      if (frame.draft.noise) { await hold(); change(() => view.noise(frame.draft)); }
      await hold();
      change(() => view.draft(frame.draft));
    }
    if (frame.settled) {
      await pause(next - performance.now(), signal);
      next = 0;
      change(() => view.settle(frame.settled));
    }
    yield frame;
  }
}

/** Waits; an abort ends it at once. */
function pause(ms, signal) {
  if (ms <= 0) return Promise.resolve();
  return new Promise((resolve, reject) => {
    const stop = () => { clearTimeout(timer); reject(signal.reason); };
    const timer = setTimeout(() => { signal.removeEventListener('abort', stop); resolve(); }, ms);
    signal.addEventListener('abort', stop, { once: true });
  });
}
