// The script of an exported replay: shows the question, and plays how its reply was denoised. Knows
// the data in its page, which server/replay.py describes, and nothing else: it asks for nothing.

import { boardClass, isBoard, puzzleIn } from './board.js';
import { CanvasView } from './canvas_view.js';
import { el } from './dom.js';
import { question } from './question.js';
import { tokensAt } from './reading.js';
import { Scrubber } from './scrubber.js';
import { harmless, useMarkers } from './tokens.js';
import { Trace } from './trace.js';

const SPEEDS = [[800, '0.8 s'], [400, '0.4 s'], [200, '0.2 s'], [80, '0.08 s']];

/** The trace of what was packed: tokens are numbers into `texts`. */
function unpacked({ texts, canvases }) {
  const named = (ids) => ids.map((id) => texts[id]);
  return new Trace(canvases.map(({ max_steps: maxSteps, noise, drafts, settled, doubted }) => ({
    maxSteps,
    noise: noise && named(noise),
    drafts: drafts.map(({ step, tokens, entropy, accepted }) => (
      { step, ids: tokens, tokens: named(tokens), entropy, accepted: [...accepted].map(Number) })),
    settled: settled && { ids: settled, tokens: named(settled), doubted },
  })));
}

function play(data) {
  useMarkers(data.markers);
  const trace = unpacked(data);
  const frames = trace.frames();
  const puzzle = puzzleIn(data.question);
  const board = puzzle ? ` ${boardClass(puzzle)}` : isBoard(data.question) ? ' board' : '';
  const answer = new CanvasView(() => {}, { class: `canvas${board}` });
  if (puzzle) answer.element.style.setProperty('--size', puzzle.size);
  const thought = new CanvasView(() => {});
  const fold = el('details', { class: 'thought', open: true, hidden: true },
    el('summary', {}, 'Thought'), thought.element);
  const at = (frame) => {
    const shown = tokensAt(trace, frame, puzzle);
    const said = shown.answer.map((token) => token.text).join('').trim();
    if (!frame && data.text && said !== harmless(data.text).trim()) {
      shown.answer = [{ key: '', text: harmless(data.text), style: '' }]; // a stop string is in tokens alone
    }
    return shown;
  };
  const draw = (frame) => {
    const shown = at(frame);
    if (shown.thought.length) fold.hidden = false;
    thought.draw(shown.thought);
    answer.draw(shown.answer);
  };
  let heldFor = '';
  const hold = () => {
    const columns = `${answer.columns} ${thought.columns}`;
    if (columns === heldFor) return; // every frame is laid out below
    heldFor = columns;
    const all = [...frames, null].map(at);
    answer.hold(Math.max(...all.map((shown) => answer.rowsFor(shown.answer))));
    thought.hold(Math.max(...all.map((shown) => thought.rowsFor(shown.thought))));
  };
  const speed = el('select', { 'aria-label': 'How long each step is shown' },
    ...SPEEDS.map(([ms, text]) => el('option', { value: ms, selected: ms === 400 }, text)));
  const scrubber = new Scrubber({ onMove: draw, onHold: hold, onRelease() {}, pace: () => Number(speed.value) });
  document.getElementById('model').textContent = data.model;
  const badge = document.getElementById('demonstration');
  badge.textContent = data.demonstration;
  badge.hidden = !data.demonstration;
  document.getElementById('turns').append(question(data.question, data.pictures), el('li', { class: 'turn reply' },
    el('h3', { class: 'unseen' }, 'Sfumato'),
    el('div', { class: 'bubble' }, fold, answer.element, el('p', { class: 'unseen' }, data.text), scrubber.element,
      el('p', { class: 'note', role: 'note', hidden: !data.remark }, data.remark),
      el('div', { class: 'foot' },
        el('p', { class: 'stats' }, ...data.summary.map((part) => el('span', {}, part))), speed))));
  scrubber.load(frames, trace.data.length);
  draw(null);
  if (frames.length) scrubber.play();
  document.addEventListener('keydown', (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.target.closest('input, select')) return;
    event.preventDefault();
    scrubber.shift(by);
  });
}

document.documentElement.dataset.theme = matchMedia('(prefers-color-scheme: light)').matches ? 'light' : 'dark';
play(JSON.parse(document.getElementById('replay').textContent));
