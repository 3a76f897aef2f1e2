// Server-sent events over fetch: EventSource can neither POST nor send an Authorization header.
// Knows the wire format, and not what the frames mean.

import { ServerError } from './errors.js';

/** The JSON of each `data:` line of a response, until [DONE]. Raises ServerError where none comes. */
export async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError(0, 'The reply broke off.');
      held += value;
      const lines = held.split(/\r?\n/);
      held = lines.pop(); // perhaps half a line
      for (const line of lines) {
        if (!line.startsWith('data:')) continue; // a comment keeps the connection alive
        const data = line.slice(5).trim();
        if (data === '[DONE]') return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // left early: the server should know
  }
}
