// What the engine is doing: queue, slots, memory, and speed over the last minutes. Asks the server
// once a second while it can be seen, and not at all otherwise. Knows what /slots and /memory answer.

import { el } from './dom.js';
import { sparkline } from './sparkline.js';

const EVERY_MS = 1000;
const GRAINS = 60; // of the history that /slots tells, when it is full
const WORDS = { snapshot_bytes: 'prefix snapshots', larger_bytes: 'larger slots' };

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
      this.element.replaceChildren(queue(state), speed(state), room(memory), slotList(state));
    } catch (error) {
      this.element.replaceChildren(el('p', { class: 'note', role: 'alert' }, error.message));
    }
    clearTimeout(this.#timer);
    if (this.#isSeen()) this.#timer = setTimeout(() => this.#poll(), EVERY_MS);
  }
}

function speed({ speeds, history }) {
  return card('Speed, over the last minute',
    figure(number(speeds.output_tokens), 'visible tok/s'),
    facts({
      'canvas tok/s': number(speeds.canvas_tokens),
      'steps/s': number(speeds.steps),
      'ms per batched step': number(speeds.ms_per_step),
      'rows per step': number(speeds.rows_per_forward),
    }),
    sparkline(history.canvas_tokens, GRAINS,
      `Canvas tokens per second, the last ${(GRAINS * history.grain_s) / 60} minutes`));
}

function queue({ waiting, running, slots, totals }) {
  const ended = Object.values(totals.requests).reduce((a, b) => a + b, 0);
  return card('Queue', figure(waiting, waiting === 1 ? 'request waits' : 'requests wait'),
    facts({
      running: `${running.length} of ${slots.length} slots`,
      'ended so far': ended,
      'prompt tokens': totals.prompt_tokens.toLocaleString(),
      'of them from the cache': totals.cached_tokens.toLocaleString(),
      'visible tokens': totals.output_tokens.toLocaleString(),
      'canvas tokens': totals.canvas_tokens.toLocaleString(),
    }));
}

function slotList({ slots, running }) {
  const rows = new Map(running.map((row) => [row.id, row]));
  return el('section', { class: 'card wide' }, el('h3', {}, 'Slots'),
    el('ul', { class: 'slots' }, ...slots.map((slot) => {
      const row = rows.get(slot.request);
      const at = row && `${row.phase}, canvas ${row.canvas + 1}, step ${row.step}/${row.max_steps}`;
      const doing = at ?? (slot.busy ? 'busy' : 'free');
      return el('li', { class: slot.busy ? 'slot busy' : 'slot' },
        el('span', {}, `${slot.index}${slot.larger ? ' (larger)' : ''}`),
        meter(slot.tokens / slot.context),
        el('span', { class: 'dim' }, `${slot.tokens.toLocaleString()} of ${slot.context.toLocaleString()}`),
        el('span', { class: 'doing' }, doing));
    })));
}

/** What /memory tells, name by name: its parts differ between devices. */
function room(memory) {
  const pairs = Object.fromEntries(flat(memory).map(([name, value]) => [
    WORDS[name] ?? name.replace(/n?_?bytes$/, '').replaceAll('_', ' ').trim(),
    typeof value === 'number' ? bytes(value) : String(value),
  ]));
  return el('section', { class: 'card wide' }, el('h3', {}, 'Memory'), ...share(memory), facts(pairs));
}

/** How much is taken of what there was at the start, where both are known. */
function share({ used, budget }) {
  if (!used || !budget) return [];
  return [
    figure(bytes(used), `used; ${bytes(budget.nbytes)} were free at the start`),
    meter(used / budget.nbytes),
  ];
}

function flat(value, name = '') {
  if (value === null || typeof value !== 'object') return [[name, value]];
  return Object.entries(value).flatMap(([key, part]) => flat(part, name ? `${name} ${key}` : key));
}

function bytes(count) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let scaled = count, unit = 0;
  while (scaled >= 1024 && unit < units.length - 1) { scaled /= 1024; unit++; }
  return `${scaled.toFixed(unit && scaled < 99.95 ? 1 : 0)} ${units[unit]}`;
}

function card(title, ...parts) { return el('section', { class: 'card' }, el('h3', {}, title), ...parts); }

function figure(value, unit) { return el('p', { class: 'figure' }, `${value} `, el('small', {}, unit)); }

function facts(pairs) {
  return el('dl', { class: 'facts' },
    ...Object.entries(pairs).flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, String(value))]));
}

function meter(share) {
  const full = el('i', { class: 'bar' });
  full.style.width = `${Math.min(1, share) * 100}%`;
  return el('span', { class: 'meter' }, full);
}

function number(value) { return value.toFixed(value >= 99.95 ? 0 : 1); }
