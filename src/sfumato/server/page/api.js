// The server's routes, as functions. Knows URLs, the API key and the shape of errors; no DOM.

import { ServerError, errorOf } from './errors.js';
import { frames } from './stream.js';

let key = '';
let onRefused = () => {};

/** The key for servers that want one; empty: none. */
export function useKey(value) { key = value; }

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

/** The answers to typed questions; body: JSON of System One's form, as text. */
export const decide = (body, signal) => json('v1/systemone', body, signal);

/** The page that an exported replay is, with a place for its data. */
export const replayTemplate = async () => (await request('replay.html')).text();

const names = new Map(); // texts of tokens, and promises of them

/** Remembers the texts of tokens. */
export function learn(ids, texts) {
  ids.forEach((id, i) => { if (texts[i]) names.set(id, texts[i]); });
}

/** The text of a token; asked for once, unless that fails. */
export async function nameOf(id) {
  if (!names.has(id)) {
    const pending = json('detokenize', { tokens: [id] }).then((answer) => answer.content);
    names.set(id, pending);
    pending.catch(() => names.delete(id));
  }
  return names.get(id);
}

/** How many tokens a text has. */
export const tokenCount = async (text, signal) => (await json('tokenize', { content: text }, signal)).count;

/** The frames of a chat completion, drafts included. Raises ServerError, also for one on the way. */
export const complete = (body, signal) => streamed('v1/chat/completions', body, signal);

/** The same of a text with holes; the last frame has its `text` and `holes`. */
export async function* fill(body, signal) {
  for await (const { settled, ...frame } of streamed('v1/fill', body, signal)) {
    if (!settled) yield frame; // it would have the tokens of the holes, and no canvas
  }
}

async function* streamed(path, body, signal) {
  const fields = { stream: true, stream_drafts: true, ...body };
  const response = await request(path, fields, signal);
  for await (const frame of frames(response)) {
    if (frame.error) throw new ServerError(200, frame.error.message ?? 'The reply broke off.');
    yield frame;
  }
}
