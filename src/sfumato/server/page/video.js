// A replay as a video file: its frames drawn on a canvas element and recorded by the browser, in the time that
// the video lasts. Knows tokens with their styles (reading.js), and no message.

import { el } from './dom.js';
import { wrap } from './wrap.js';

const KINDS = ['video/webm;codecs=vp9', 'video/webm;codecs=vp8', 'video/webm', 'video/mp4'];
const WIDTH = 960, EDGE = 48, LINE = 36, FONT = 22; // pixels
const MOST_LINES = 24; // of text; of a longer reply the last ones
const STEP_MS = 400, LEAST_MS = 80, MOST_MS = 20_000, LAST_MS = 1_500; // of a frame, and of all of them
const TICK_MS = 80; // between two pictures of the video: a canvas that rests makes none
const OPACITY = { 'haze-1': 0.72, 'haze-2': 0.5, 'haze-3': 0.34 }; // as reply.css has them
const BIT_RATE = 2_000_000;

/** Whether this browser records at all. */
export const canRecord = () => Boolean(kind()) && 'captureStream' in HTMLCanvasElement.prototype;

const kind = () => globalThis.MediaRecorder && KINDS.find((one) => MediaRecorder.isTypeSupported(one));

/**
 * frames: lists of tokens, [{ text, style }], the last one settled; labels: a line for each; title: the
 * question. onProgress(share) is called as it goes. Returns { blob, name }; raises what `signal` was aborted with.
 */
export async function record(frames, labels, { title, isBoard, onProgress, signal }) {
  const every = Math.ceil(frames.length * LEAST_MS / MOST_MS);
  const kept = frames.map((_, i) => i).filter((i) => (frames.length - 1 - i) % every === 0);
  const hold = Math.min(STEP_MS, MOST_MS / kept.length);
  const { canvas, draw } = screen(frames, { title, isBoard });
  const recorder = new MediaRecorder(canvas.captureStream(), { mimeType: kind(), videoBitsPerSecond: BIT_RATE });
  const parts = [];
  recorder.addEventListener('dataavailable', ({ data }) => parts.push(data));
  const stopped = new Promise((resolve) => { recorder.addEventListener('stop', resolve); });
  draw(frames[kept[0]], labels[kept[0]]);
  recorder.start();
  try {
    for (const [done, i] of kept.entries()) {
      const end = performance.now() + (i === frames.length - 1 ? LAST_MS : hold);
      do {
        signal.throwIfAborted();
        draw(frames[i], labels[i]);
        await new Promise((resolve) => { setTimeout(resolve, TICK_MS); });
      } while (performance.now() < end);
      onProgress((done + 1) / kept.length);
    }
  } finally {
    recorder.stop();
  }
  await stopped;
  const { mimeType } = recorder;
  return { blob: new Blob(parts, { type: mimeType }), name: `sfumato-replay.${mimeType.includes('mp4') ? 'mp4' : 'webm'}` };
}

/** A canvas element for the tallest frame, and what draws a frame on it. */
function screen(frames, { title, isBoard }) {
  const style = getComputedStyle(document.documentElement);
  const colour = Object.fromEntries(['paper', 'ink', 'dim', 'accent'].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const canvas = el('canvas', { width: WIDTH, height: LINE });
  const pen = canvas.getContext('2d');
  const font = (size, weight = 400) => `${weight} ${size}px ${style.getPropertyValue('--mono')}`;
  const dress = () => {
    pen.font = font(FONT);
    pen.textBaseline = 'middle';
    if ('letterSpacing' in pen) pen.letterSpacing = isBoard ? `${FONT / 2}px` : '0px';
  };
  dress();
  const columns = Math.floor((WIDTH - 2 * EDGE) / pen.measureText('0').width);
  let breaks = null;
  const linesOf = (tokens) => {
    const wrapped = wrap(tokens.map(({ text }) => text), columns, breaks);
    breaks = wrapped.breaks;
    return wrapped.lines.slice(-MOST_LINES);
  };
  const rows = Math.max(1, ...frames.map((tokens) => linesOf(tokens).length));
  canvas.height = (rows + 4) * LINE;
  breaks = null;

  function draw(tokens, label) {
    dress();
    Object.assign(pen, { globalAlpha: 1, fillStyle: colour.paper });
    pen.fillRect(0, 0, WIDTH, canvas.height);
    linesOf(tokens).forEach((line, row) => {
      let x = EDGE;
      for (const { piece, text } of line) {
        const { style: look = '' } = tokens[piece];
        const haze = Object.keys(OPACITY).find((name) => look.includes(name));
        const isFound = look.includes('cell') && !look.includes('given') && !haze;
        pen.globalAlpha = OPACITY[haze] ?? 1;
        pen.fillStyle = look.includes('glow-0') || look.includes('glow-1') || isFound ? colour.accent : colour.ink;
        if (look.includes('given')) pen.font = font(FONT, 700);
        pen.fillText(text, x, (row + 2.5) * LINE);
        x += pen.measureText(text).width;
        pen.font = font(FONT);
      }
    });
    Object.assign(pen, { globalAlpha: 1, fillStyle: colour.dim, font: font(FONT * 0.7) });
    if ('letterSpacing' in pen) pen.letterSpacing = '0px';
    pen.fillText(title, EDGE, LINE, WIDTH - 2 * EDGE);
    pen.fillText(label, EDGE, canvas.height - LINE * 0.8, WIDTH - 2 * EDGE);
  }
  return { canvas, draw };
}
