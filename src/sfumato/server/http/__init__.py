"""HTTP around the engine: bodies, requests in flight, streams, security, logs. Knows no dialect."""
