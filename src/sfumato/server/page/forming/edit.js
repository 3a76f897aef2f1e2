// The Edit mode: a text, and what is to change in it. The canvas begins as the text, a share of whose
// positions is noise. Knows what is asked and how the changes are shown.

import { complete, tokenCount } from '../api.js';
import { button, el } from '../dom.js';
import { harmless } from '../tokens.js';
import { changes, withChanges } from './changes.js';
import { Mode, Wrong } from './mode.js';

const ROOM = 64; // tokens beyond twice the text's, as Model.edit has it

export class Edit extends Mode {
  #prompt = ''; // with {instruction} and {text} in it

  constructor(element, settings) {
    super(element, {
      settings,
      hint: 'The changed text forms here. What has changed glows.',
      blame: { prediction: 'text', messages: 'instruction' },
    });
    this.share = element.querySelector('output');
    this.restore();
    this.#showStrength();
  }

  meet(about) {
    this.#prompt = about.prompt;
    super.meet(about);
    this.#showStrength();
  }

  fromExample({ text, instruction }) { return { ...this.values, text, instruction }; }

  changed(name) {
    super.changed(name);
    this.#showStrength();
  }

  async request(fields, signal) {
    const { text, instruction, strength } = this.values;
    if (!text.trim()) throw new Wrong('text', 'Write the text that is to be changed.');
    if (!instruction.trim()) throw new Wrong('instruction', 'Write what is to change.');
    const content = this.#prompt.replace(/\{(text|instruction)\}/g, (_, name) => ({ text, instruction })[name]);
    const body = {
      messages: [{ role: 'user', content }],
      prediction: { type: 'content', content: text, strength: Number(strength) },
      max_tokens: 2 * await tokenCount(text, signal) + ROOM,
      stream_options: { include_usage: true },
      ...fields,
    };
    const given = harmless(text);
    return {
      frames: complete(body, signal),
      stage: { dress: (tokens) => withChanges(tokens, given) },
      end: (record) => this.#end(text, record),
    };
  }

  #end(text, { content, finish, usage, warnings = [] }) {
    // A reply has no line end after it; one that the text ends with is no change.
    const after = content.trimEnd() + (/\s*$/.exec(text)[0]);
    const pieces = changes(harmless(text), harmless(after));
    const kept = usage?.completion_tokens_details.accepted_prediction_tokens;
    const note = [
      finish === 'length' ? 'The token limit cut the text off.' : '',
      after === text ? 'Nothing has changed.' : '',
      kept === undefined ? '' : `${kept} ${kept === 1 ? 'token' : 'tokens'} of the text were kept.`,
      ...warnings,
    ].filter(Boolean).join(' ');
    return {
      text: after,
      final: pieces.map(({ text: words, kind }, i) => ({ key: `word ${i}`, text: words, style: STYLES[kind] })),
      note,
      extra: after === text ? [] : [this.#offer(text, after)],
    };
  }

  /** Accept and Undo. */
  #offer(before, after) {
    const accept = button('Accept', () => {
      this.replace({ ...this.values, text: after });
      accept.hidden = true;
      undo.hidden = false;
      undo.focus();
    }, { class: 'strong' });
    const undo = button('Undo', () => {
      this.replace({ ...this.values, text: before });
      undo.hidden = true;
      accept.hidden = false;
      accept.focus();
    }, { hidden: true });
    return el('div', { class: 'offer' }, accept, undo);
  }

  #showStrength() { this.share.textContent = `${Math.round(100 * this.values.strength)} %`; }
}

const STYLES = { same: '', added: 'changed', removed: 'removed' };
