// How one reply was denoised: for every canvas its drafts, step by step, and its settled tokens. The
// one source for the text, the scrubber, the heat maps and the inspector. Plain data inside, so
// that it can be kept across a reload. Knows no DOM.

const round = (value, digits) => Number(value.toFixed(digits));

export class Trace {
  /** canvases: what `data` of an earlier trace was; model: the name of the model, of several. */
  constructor(canvases = [], model = undefined) {
    this.data = canvases;
    this.model = model;
    for (const canvas of canvases) {
      for (const draft of canvas.drafts) {
        draft.top = new TopTokens(draft.top);
      }
      markChanges(canvas);
    }
  }

  /** Adds a `draft` frame. A step that comes again means that the canvas is drawn again. */
  draft(frame) {
    const canvas = this.#canvas(frame.canvas, frame.pinned);
    const last = canvas.drafts.at(-1);
    if (last && frame.step <= last.step) { canvas.drafts = []; canvas.again = true; }
    canvas.maxSteps = frame.max_steps;
    if (frame.noise) canvas.noise = frame.noise;
    canvas.drafts.push({
      step: frame.step,
      ids: frame.token_ids,
      tokens: frame.tokens,
      entropy: frame.entropy.map((nats) => round(nats, 3)),
      accepted: frame.accepted.map(Number),
      top: TopTokens.of(frame.top ?? []),
    });
    markChanges(canvas, canvas.drafts.length - 1);
  }

  /** Adds the noise that a canvas begins with, before its first draft. */
  begin(frame) {
    const canvas = this.#canvas(frame.canvas, frame.pinned);
    canvas.maxSteps = frame.max_steps;
    if (canvas.drafts.length) Object.assign(canvas, { drafts: [], again: true });
    canvas.noise = frame.noise;
  }

  /** Adds a `settled` frame. */
  settle(frame) {
    const canvas = this.#canvas(frame.canvas);
    canvas.settled = {
      ids: frame.token_ids, tokens: frame.tokens,
      convergence: frame.convergence, steps: frame.steps,
      ...frame.doubted?.length && { doubted: frame.doubted },
    };
  }

  /** pinned: of a text with holes, for each position whether its token is given. */
  #canvas(index, pinned) {
    while (this.data.length <= index) this.data.push({ maxSteps: 0, drafts: [], settled: null });
    if (pinned) this.data[index].pinned = pinned;
    return this.data[index];
  }

  /** Every step of every canvas, in order: [{ canvas, draft, step }], the first two indices; draft -1
   *  is the noise. Some steps may be missing: a server leaves out some for slow clients. */
  frames() {
    return this.data.flatMap(({ drafts, noise }, c) => [
      ...noise && drafts.length ? [{ canvas: c, draft: -1, step: 0 }] : [],
      ...drafts.map(({ step }, d) => ({ canvas: c, draft: d, step })),
    ]);
  }

  /** The token that position settled to (or stands at, where nothing settled): { id, text }. */
  settledAt(canvas, position) {
    const { settled, drafts } = this.data[canvas];
    const last = drafts.at(-1);
    const from = settled && position < settled.ids.length ? settled : last;
    return { id: from.ids[position], text: from.tokens[position] ?? '' };
  }

  /** Where the settled token stood at a draft: { rank (1 is the most probable, null: not among those kept), p }. */
  standing(canvas, position, draft) {
    const top = this.data[canvas].drafts[draft].top.at(position);
    const rank = top.findIndex(([id]) => id === this.settledAt(canvas, position).id);
    return rank < 0 ? { rank: null, p: null } : { rank: rank + 1, p: top[rank][1] };
  }

  /** The step at which a position had last changed, seen from a draft. */
  changedStep(canvas, position, draft) {
    const { drafts } = this.data[canvas];
    return drafts[drafts[draft].changed[position]].step;
  }

  /** Drafts since a position changed, seen from a draft: 0 is fresh. */
  age(canvas, position, draft) {
    return draft - this.data[canvas].drafts[draft].changed[position];
  }
}

/** The most probable tokens of each position of a draft. In two flat arrays: as lists of pairs they
 *  would be most of what the page holds. */
class TopTokens {
  /** Of what its JSON was, or of nothing. `few` is the name of `perPosition` in traces kept by
   *  earlier versions of the page. */
  constructor({ few = 0, perPosition = few, ids = [], p = [] } = {}) {
    this.perPosition = perPosition;
    this.ids = Int32Array.from(ids);
    this.p = Float32Array.from(p);
  }

  /** Of [[[id, p], …perPosition], …positions]. */
  static of(top) {
    const flat = top.flat();
    return new TopTokens({
      perPosition: top[0]?.length, ids: flat.map(([id]) => id), p: flat.map(([, p]) => p),
    });
  }

  /** [[id, p], …] of a position, the most probable first; empty where they were not kept. */
  at(position) {
    return Array.from({ length: this.perPosition }, (_, k) => {
      const i = position * this.perPosition + k;
      return [this.ids[i], this.p[i]];
    });
  }

  toJSON() {
    return {
      perPosition: this.perPosition,
      ids: [...this.ids], p: Array.from(this.p, (p) => round(p, 4)),
    };
  }
}

/** `changed` of each draft: for each position, the index of the draft at which it last changed. */
function markChanges(canvas, from = 0) {
  const { drafts } = canvas;
  for (let d = from; d < drafts.length; d++) {
    const before = drafts[d - 1];
    const changed = drafts[d].ids.map((id, p) => (before?.ids[p] === id ? before.changed[p] : d));
    // Derived: kept out of what is written to storage.
    Object.defineProperty(drafts[d], 'changed', { value: changed, configurable: true });
  }
}
