// What goes wrong between the page and the server.

/**
 * An answer other than 200: `message` is for the reader, `status` is the HTTP status, 0 for none, and
 * `place` is where in the body the fault is, as a list of names, where the server says so.
 */
export class ServerError extends Error {
  constructor(status, message, place = null) {
    super(message);
    this.status = status;
    this.place = place;
  }
}

/** The error of a response's JSON, in the form of OpenAI's API or of System One's. */
export function errorOf(status, { error, detail } = {}) {
  const [wrong] = Array.isArray(detail) ? detail : [];
  const words = wrong?.msg ?? detail?.message ?? error?.message ?? `HTTP ${status}`;
  const field = error?.param?.split(/[.[\]]+/).filter(Boolean); // as in messages[0].content
  return new ServerError(status, words, wrong?.loc?.slice(1) ?? field ?? null); // all are in the body
}

/** Words as the beginning of a sentence. */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
