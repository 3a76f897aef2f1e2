// What goes wrong between the page and the server.

/** An answer other than 200: `message` is for the reader, `status` is the HTTP status, 0 for none. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}
