// Saves a reply's replay as one page that plays by itself. The page is the server's template, as
// `sfumato run --replay` fills it (see server/replay.py, which says what it is filled with).

import { replayTemplate } from './api.js';
import { remark, summary } from './footer.js';

const MOST_POSITIONS = 400_000; // of drafts: some megabytes; above, steps are left out
const SLOT = '"REPLAY"';

/** The data of a replay, as server/replay.py packs it; of a question its text and thumbnails. */
export function pack({ record, trace }, { content, pictures = [] }, about) {
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
  }));
  return {
    version: 1,
    model: about.model ?? '',
    question: content,
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

/** Has the browser save the replay of a reply; label: the button, which shows the result. */
export async function share(view, question, about, label) {
  try {
    const page = filled(await replayTemplate(), pack(view, question, about));
    const address = URL.createObjectURL(new Blob([page], { type: 'text/html' }));
    const link = Object.assign(document.createElement('a'), { href: address, download: 'sfumato-replay.html' });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    label.textContent = 'Saved';
  } catch (error) {
    console.warn(error);
    label.textContent = 'Not saved';
  }
  setTimeout(() => { label.textContent = 'Share'; }, 2000);
}
