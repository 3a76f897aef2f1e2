// The JSON mode: a schema on one side, the object that it holds the reply to on the other. Knows what
// is asked and how the answer is shown.

import { complete } from '../api.js';
import { pretty } from '../decide/literal.js';
import { Mode, Wrong } from './mode.js';

const LINE = 48; // characters of an example's schema
const MOST_TOKENS = 512; // where the settings do not say

export class Json extends Mode {
  constructor(element, settings) {
    super(element, {
      settings,
      hint: 'The object forms here. What breaks the schema is not kept from one step to the next.',
      blame: { response_format: 'schema', messages: 'prompt' },
    });
    this.restore();
  }

  fromExample({ prompt, schema }) { return { prompt, schema: pretty(schema, { line: LINE }) }; }

  request(fields, signal) {
    const { prompt, schema: text } = this.values;
    if (!prompt.trim()) throw new Wrong('prompt', 'Write what the object is to say.');
    const schema = parsed(text);
    const body = {
      messages: [{ role: 'user', content: prompt }],
      response_format: { type: 'json_schema', json_schema: { name: 'object', schema } },
      max_tokens: this.settings.values.max_tokens ?? MOST_TOKENS,
      ...fields,
    };
    return { frames: complete(body, signal), end };
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Wrong('schema', `This is no JSON: ${error.message}.`);
  }
}

function end({ content, finish, timings }) {
  const { steps = 0, repairs = 0, causal_tokens: written = 0 } = timings?.diffusion.constraint ?? {};
  const taken = [
    steps && count(steps, 'step was', 'steps were') + ' held to the schema',
    repairs && count(repairs, 'canvas was', 'canvases were') + ' denoised again',
    written && count(written, 'token was', 'tokens were') + ' written one by one',
  ].filter(Boolean);
  const held = finish === 'stop' ? 'The object matches the schema' : 'The token limit cut the object off';
  return { text: content, note: `${held}${taken.length ? `; ${taken.join(', ')}` : ''}.` };
}

const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;
