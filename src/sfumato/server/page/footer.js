// The line below a reply: what it took, in numbers that a reader may compare. Knows the server's
// `timings`, and no DOM.

const three = (value) => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
const count = (number, one) => `${number} ${number === 1 ? one : `${one}s`}`;

/** While the prompt is encoded: llama-server's `prompt_progress`. */
export function reading({ total, cache, processed, time_ms: ms }) {
  const done = total ? Math.floor(100 * processed / total) : 100;
  const fields = [`reading the prompt: ${processed.toLocaleString('en')} of ${total.toLocaleString('en')} tokens`, `${done} %`];
  const encoded = processed - cache;
  if (encoded > 0 && processed < total) fields.push(left((total - processed) * ms / 1000 / encoded));
  return fields;
}

/** Seconds that are left, as a person reads them. */
function left(seconds) {
  if (seconds < 1) return 'under 1 s left';
  const whole = Math.ceil(seconds);
  return whole < 60 ? `${whole} s left` : `${Math.floor(whole / 60)} min ${whole % 60} s left`;
}

/**
 * While it runs: where the work stands. times: { canvas, tokens, before }, see message.js. What is left
 * is of this canvas alone, and at most so much: a canvas may settle before its last step.
 */
export function progress(canvas, drafts, maxSteps, times = null) {
  const last = drafts.at(-1);
  const share = last.accepted.reduce((a, b) => a + b, 0) / last.accepted.length;
  const full = Math.round(share * 8);
  const step = String(last.step).padStart(String(maxSteps).length, '\u2007');
  const fields = [`canvas ${canvas + 1}`, `step ${step}/${maxSteps}`, '━'.repeat(full) + '╌'.repeat(8 - full)];
  if (times?.tokens && times.before > 0) fields.push(`${three(times.tokens / times.before)} tok/s`);
  const steps = drafts.length - 1;
  if (steps > 0 && times) fields.push(`at most ${left((maxSteps - last.step) * times.canvas / steps)}`);
  return fields;
}

/** When it is done: from `timings` with its `diffusion` part; fewer fields where there is less. */
export function summary({ timings, finish, seed, stopped, model }) {
  const fields = [];
  const diffusion = timings?.diffusion;
  if (diffusion) {
    const steps = [diffusion.steps].flat().reduce((a, b) => a + b, 0);
    const among = diffusion.blocks > 1 ? ` in ${diffusion.blocks} canvases` : '';
    fields.push(count(steps, 'step') + among);
    if (diffusion.ms_per_step) fields.push(`${three(diffusion.ms_per_step)} ms/step`);
    if (diffusion.tokens_per_forward) fields.push(`${three(diffusion.tokens_per_forward)} tok/forward`);
    if (timings.predicted_per_second) fields.push(`${three(timings.predicted_per_second)} tok/s`);
    fields.push(ending(diffusion.convergence));
  }
  if (stopped) fields.unshift('stopped');
  if (finish === 'length') fields.push('cut off by the token limit');
  if (seed !== undefined) fields.push(`seed ${seed}`);
  if (model) fields.push(model);
  return fields.filter(Boolean);
}

function ending(convergence) {
  const capped = (convergence ?? []).filter((one) => one === 'step_cap').length;
  if (!convergence?.length) return '';
  if (!capped) return 'converged';
  return `step cap reached${convergence.length > 1 ? ` ${capped} of ${convergence.length} times` : ''}`;
}

const CANNOT = 'this demonstration model cannot answer that'; // a warning of the server

const ASK = 'Ask a whole question, as “What is the capital of Japan?”, or begin a new conversation (+).';

/** The line below a reply; '' where there is none. */
export function remark({ warnings, doubts = '' }) {
  if (warnings?.includes(CANNOT)) return `${CANNOT[0].toUpperCase()}${CANNOT.slice(1)}. ${ASK} ${doubts}`.trim();
  return [...warnings ?? [], doubts].filter(Boolean).join(' ');
}

const MOST_SHOWN = 5; // doubts of a note

/** What a second reader found of a reply, in words. */
export function doubtsOf({ agreement, doubts }) {
  const share = `${Math.floor(100 * agreement)} % of the tokens are the causal mode's own choice`;
  if (!doubts.length) return `${share}, and it doubts none of the text.`;
  const shown = doubts.slice(0, MOST_SHOWN).map(({ text }) => `“${text.trim() || '␣'}”`).join(', ');
  const more = doubts.length > MOST_SHOWN ? ` and ${doubts.length - MOST_SHOWN} more` : '';
  return `${share}. It doubts ${shown}${more}.`;
}
