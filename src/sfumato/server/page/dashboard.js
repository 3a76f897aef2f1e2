// The engine's state: queue, slots, memory, and speed over the last minutes. Polls the server once a
// second while the view is visible, and not otherwise. Knows the answers of /state and /memory.

import { el } from './dom.js';
import { sparkline } from './sparkline.js';

const EVERY_MS = 1000;
const GRAINS = 60; // of the history in /state, when it is full
// Parts of the predicted memory that add up to its total, by their names in /memory.
const PARTS = {
  weights: 'Weights of the model',
  slots: 'Slots: prompts and replies',
  working: 'A denoising step, or reading a prompt',
  pictures: 'Pictures, as the model sees them',
  snapshots: 'Remembered beginnings of prompts',
  libraries: 'Buffers of libraries',
};

export class Dashboard {
  #timer = null;
  #wanted = false;

  constructor(element, { slots, memory }) {
    Object.assign(this, { element, slots, memory });
    document.addEventListener('visibilitychange', () => this.#turn());
  }

  /** Whether the view is open. */
  watch(wanted) {
    this.#wanted = wanted;
    this.#turn();
  }

  #turn() {
    clearTimeout(this.#timer);
    if (this.#isSeen()) this.#poll();
  }

  #isSeen() { return this.#wanted && !document.hidden; }

  async #poll() {
    try {
      const [state, memory] = await Promise.all([this.slots(), this.memory()]);
      this.element.replaceChildren(speed(state), queue(state), slotList(state), room(memory));
    } catch (error) {
      this.element.replaceChildren(el('p', { class: 'note', role: 'alert' }, error.message));
    }
    clearTimeout(this.#timer);
    if (this.#isSeen()) this.#timer = setTimeout(() => this.#poll(), EVERY_MS);
  }
}

/** Speeds over the last minute; the headline is over that part of it in which there was work. */
function speed({ speeds, totals, history }) {
  const { value, unit } = whileBusy(speeds, totals);
  return card('Speed while busy', figure(value, unit),
    facts({
      'Visible tokens per second, pauses included': number(speeds.output_tokens),
      'Canvas tokens per second, pauses included': number(speeds.canvas_tokens),
      'Milliseconds per step': number(speeds.ms_per_step),
      'Requests per step': number(speeds.rows_per_forward),
      'Visible tokens per step of a request': speeds.steps ? number(speeds.output_tokens / speeds.steps) : '–',
    }),
    sparkline(history.canvas_tokens, GRAINS,
      `Canvas tokens per second, the last ${(GRAINS * history.grain_s) / 60} minutes`));
}

/** Tokens per second of denoising: in the last minute, else since the server started. */
function whileBusy(speeds, totals) {
  const { output_tokens: visible, canvas_tokens: canvas, rows_per_forward: rows } = speeds;
  const busy = rows ? (speeds.steps / rows) * (speeds.ms_per_step / 1000) : 0; // the share of the minute
  const rateOf = (rate, unit) => ({ value: number(rate), unit });
  if (busy && visible) return rateOf(visible / busy, 'visible tokens per second, the last minute');
  if (busy && canvas) return rateOf(canvas / busy, 'canvas tokens per second, the last minute');
  if (totals.denoise_s && totals.output_tokens) {
    return rateOf(totals.output_tokens / totals.denoise_s, 'visible tokens per second, since the start');
  }
  return { value: '–', unit: 'no reply yet' };
}

function queue({ waiting, running, slots, totals }) {
  const ended = Object.values(totals.requests).reduce((a, b) => a + b, 0);
  return card('Requests', figure(running.length, running.length === 1 ? 'request runs' : 'requests run'),
    facts({
      'Waiting for a slot': waiting,
      'Slots in use': `${running.length} of ${slots.length}`,
      'Ended so far': ended.toLocaleString(),
      'Prompt tokens': totals.prompt_tokens.toLocaleString(),
      'Prompt tokens reused': totals.cached_tokens.toLocaleString(),
      'Visible tokens of replies': totals.output_tokens.toLocaleString(),
      'Canvas tokens': totals.canvas_tokens.toLocaleString(),
    }));
}

const PHASES = { queued: 'waiting', prefill: 'reading the prompt', denoise: 'denoising', commit: 'storing a canvas', read: 'reading questions' };

function slotList({ slots, running }) {
  const rows = new Map(running.map((row) => [row.id, row]));
  return el('section', { class: 'card wide' }, el('h3', {}, 'Slots'),
    el('ul', { class: 'slots' }, ...slots.map((slot) => {
      const row = rows.get(slot.request);
      const phase = row && (PHASES[row.phase] ?? row.phase);
      const doing = row
        ? [phase, el('span', { class: 'roomy' }, `, canvas ${row.canvas + 1}`), `, step ${row.step}/${row.max_steps}`]
        : [slot.busy ? 'busy' : 'free'];
      return el('li', { class: slot.busy ? 'slot busy' : 'slot' },
        el('span', {}, `${slot.index + 1}${slot.larger ? ' (larger)' : ''}`),
        meter(slot.tokens / slot.context),
        el('span', { class: 'roomy dim' }, `${slot.tokens.toLocaleString()} of ${slot.context.toLocaleString()}`),
        el('span', { class: 'doing' }, ...doing));
    })));
}

/** Memory in use, and the parts of what the model and its requests take at most. */
function room(memory) {
  const { prediction } = memory;
  const working = Math.max(prediction.step, prediction.prefill); // one after the other
  const parts = { ...prediction, working };
  const { unit, round } = scaleOf(prediction.total);
  const shown = Object.keys(PARTS).filter((name) => name !== 'pictures' || parts.pictures); // none, where none is read
  const rounded = shown.map((name) => [PARTS[name], round(parts[name])]);
  const total = rounded.reduce((sum, [, value]) => sum + Number(value), 0);
  const rows = [...rounded, ['Total', round(total * unit.size)]];
  return el('section', { class: 'card wide' }, el('h3', {}, 'Memory'), ...share(memory),
    el('p', { class: 'caption' }, 'What the model and its requests take at most, as predicted:'),
    facts(Object.fromEntries(rows.map(([label, value]) => [label, `${value} ${unit.name}`])), 'sum'));
}

/** How much is taken of what there was at the start, where both are known. */
function share({ used, budget }) {
  if (!used || !budget) return [];
  return [
    figure(bytes(used), `used by the whole server; ${bytes(budget.nbytes)} were free at the start`),
    meter(used / budget.nbytes),
  ];
}

/** The unit in which a count of bytes is a short number, and numbers of bytes in it. */
function scaleOf(count) {
  const names = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let power = 0;
  while (count >= 1024 ** (power + 1) && power < names.length - 1) power++;
  const size = 1024 ** power;
  const digits = power >= 3 ? 2 : power && 1; // small parts of many GiB are to be seen
  return { unit: { name: names[power], size }, round: (nbytes) => (nbytes / size).toFixed(digits) };
}

function bytes(count) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let scaled = count, unit = 0;
  while (scaled >= 1024 && unit < units.length - 1) { scaled /= 1024; unit++; }
  return `${scaled.toFixed(unit && scaled < 99.95 ? 1 : 0)} ${units[unit]}`;
}

function card(title, ...parts) { return el('section', { class: 'card' }, el('h3', {}, title), ...parts); }

function figure(value, unit) { return el('p', { class: 'figure' }, `${value} `, el('small', {}, unit)); }

function facts(pairs, kind = '') {
  return el('dl', { class: `facts ${kind}` },
    ...Object.entries(pairs).flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, String(value))]));
}

function meter(share) {
  const full = el('i', { class: 'bar' });
  full.style.width = `${Math.min(1, share) * 100}%`;
  return el('span', { class: 'meter' }, full);
}

function number(value) { return value.toFixed(value >= 99.95 ? 0 : 1); }
