// Saves a reply's replay as one page that plays by itself, or as a video. The page is the server's template, as
// `sfumato run --replay` fills it (see server/replay.py, which says what it is filled with).

import { replayTemplate } from './api.js';
import { isBoard } from './board.js';
import { remark, summary } from './footer.js';
import { record } from './video.js';

const MOST_POSITIONS = 400_000; // of drafts: some megabytes; above, steps are left out
const SLOT = '"REPLAY"';

/** The data of a replay, as server/replay.py packs it; of a question its text and thumbnails. */
export function pack({ record, trace }, { content, pictures = [], files = [] }, about) {
  const texts = new Map();
  const number = (text) => texts.get(text) ?? texts.set(text, texts.size).get(text);
  const numbers = (tokens) => tokens.map(number);
  const canvases = thinned(trace.data).map(({ drafts, settled, noise, maxSteps }) => ({
    max_steps: maxSteps,
    noise: noise ? numbers(noise) : null,
    drafts: drafts.map(({ step, tokens, entropy, accepted }) => ({
      step,
      tokens: numbers(tokens),
      entropy: entropy.map((nats) => Number(nats.toFixed(2))),
      accepted: accepted.join(''),
    })),
    settled: settled && numbers(settled.tokens),
    ...settled?.doubted && { doubted: settled.doubted },
  }));
  return {
    version: 1,
    model: about.model ?? '',
    question: [content, ...files.map(({ name }) => `[${name}]`)].filter(Boolean).join('\n'),
    pictures: pictures.map(({ name, thumb }) => ({ name, thumb })),
    text: record.content,
    summary: summary(record),
    demonstration: about.demonstration ?? '',
    remark: remark(record),
    markers: about.markers ?? {},
    texts: [...texts.keys()],
    canvases,
  };
}

/** Canvases with every second draft left out, until they are few enough; the last ones stay. */
function thinned(canvases) {
  let kept = canvases;
  const positions = () => kept.reduce((sum, { drafts }) =>
    sum + drafts.reduce((all, { tokens }) => all + tokens.length, 0), 0);
  while (positions() > MOST_POSITIONS && kept.some(({ drafts }) => drafts.length > 1)) {
    kept = kept.map((canvas) => ({
      ...canvas, drafts: canvas.drafts.filter((_, i) => (canvas.drafts.length - 1 - i) % 2 === 0),
    }));
  }
  return kept;
}

/** The page with the data in it. No `<` is left in the data, so that it cannot end its element. */
export const filled = (template, data) =>
  template.replace(SLOT, () => JSON.stringify(data).replaceAll('<', '\\u003c'));

/** Has the browser save a file. */
function save(blob, name) {
  const address = URL.createObjectURL(blob);
  Object.assign(document.createElement('a'), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Says on a button what came of it, for a while. */
function tell(button, text, ms = 2000) {
  button.dataset.label ??= button.textContent;
  button.textContent = text;
  if (ms) setTimeout(() => { button.textContent = button.dataset.label; }, ms);
}

/** Has the browser save the replay of a reply as a page; button: shows the result. */
export async function saveReplay(view, question, about, button) {
  try {
    const page = filled(await replayTemplate(), pack(view, question, about));
    save(new Blob([page], { type: 'text/html' }), 'sfumato-replay.html');
    tell(button, 'Saved sfumato-replay.html');
  } catch (error) {
    console.warn(error);
    tell(button, 'Not saved');
  }
}

const recordings = new WeakMap(); // buttons → the AbortController of their recording

/** The same as a video, which takes as long as it lasts; the button stops it meanwhile. */
export async function saveVideo(view, question, about, button) {
  if (recordings.has(button)) { recordings.get(button).abort(); return; }
  const stop = new AbortController();
  recordings.set(button, stop);
  tell(button, 'Stop recording', 0);
  try {
    const frames = [...view.trace.frames(), null];
    const labels = frames.map((frame) => (frame
      ? `canvas ${frame.canvas + 1}, ${frame.step ? `step ${frame.step}` : 'noise'}` : summary(view.record).join(' · ')));
    const { blob, name } = await record(frames.map((frame) => view.tokensAt(frame)), labels, {
      title: [question.content.trim().split('\n')[0], about.model].filter(Boolean).join(' · '),
      isBoard: isBoard(question.content), signal: stop.signal,
      onProgress: (share) => tell(button, `Stop recording (${Math.round(100 * share)} %)`, 0),
    });
    save(blob, name);
    tell(button, `Saved ${name}`);
  } catch (error) {
    if (!stop.signal.aborted) console.warn(error);
    tell(button, 'Not saved');
  }
  recordings.delete(button);
}
