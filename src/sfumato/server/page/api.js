// The server's routes, as functions. Knows URLs, the API key and the shape of errors; no DOM.

import { ServerError, errorOf } from './errors.js';
import { frames } from './stream.js';

let key = '';
let onRefused = () => {};
let chosen; // the model that requests name, where a server has several

/** The key for servers that want one; empty: none. */
export function useKey(value) { key = value; }

/** The model that requests name; undefined: they name none. */
export function useModel(name) { chosen = name; }

/** The model that requests name. */
export const chosenModel = () => chosen;

/** Has the server load a model, and resolves when it can answer. */
export const loadModel = (model) => json('tokenize', { model, content: '' });

/** listener() is called whenever the server refuses the key. */
export function whenKeyIsRefused(listener) { onRefused = listener; }

async function request(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers['Content-Type'] = 'application/json';
  const options = { method: body ? 'POST' : 'GET', headers, signal };
  if (body) options.body = typeof body === 'string' ? body : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(0, 'The server does not answer.');
  }
  if (response.status === 401) onRefused();
  if (!response.ok) {
    throw errorOf(response.status, await response.json().catch(() => ({})));
  }
  return response;
}

const json = async (path, body, signal) => (await request(path, body, signal)).json();

export const props = () => json('props');
export const slots = () => json('state');
export const memory = () => json('memory');

/** The answers to typed questions; body: JSON of System One's form, as text, an object with fields. */
export const decide = (body, signal) => json('v1/systemone',
  chosen ? `{"model":${JSON.stringify(chosen)},${body.trimStart().slice(1)}` : body, signal);

/** The page that an exported replay is, with a place for its data. */
export const replayTemplate = async () => (await request('replay.html')).text();

const names = new Map(); // texts of tokens, and promises of them, by model and id
const nameKey = (id, model) => `${id} ${model ?? ''}`;

/** Remembers the texts of a model's tokens. */
export function learn(ids, texts, model = chosen) {
  ids.forEach((id, i) => { if (texts[i]) names.set(nameKey(id, model), texts[i]); });
}

/** The text of a model's token; asked for once, unless that fails. Of a model that is not loaded, what is known. */
export async function nameOf(id, model = chosen) {
  const key = nameKey(id, model);
  if (!names.has(key)) {
    if (model !== chosen) throw new ServerError(0, `The model ${model} is not loaded.`);
    const pending = json('detokenize', named({ tokens: [id] })).then((answer) => answer.content);
    names.set(key, pending);
    pending.catch(() => names.delete(key));
  }
  return names.get(key);
}

const named = (body) => (chosen ? { model: chosen, ...body } : body);

/** How many tokens a text has. */
export const tokenCount = async (text, signal) => (await json('tokenize', named({ content: text }), signal)).count;

/** The frames of a chat completion, drafts included. Raises ServerError, also for one on the way. */
export const complete = (body, signal) => streamed('v1/chat/completions', body, signal);

/** The same of a text with holes; the last frame has its `text` and `holes`. */
export async function* fill(body, signal) {
  for await (const { settled, ...frame } of streamed('v1/fill', body, signal)) {
    if (!settled) yield frame; // it would have the tokens of the holes, and no canvas
  }
}

async function* streamed(path, body, signal) {
  const fields = named({ stream: true, stream_drafts: true, ...body });
  const response = await request(path, fields, signal);
  for await (const frame of frames(response)) {
    if (frame.error) throw new ServerError(200, frame.error.message ?? 'The reply broke off.');
    yield frame;
  }
}
