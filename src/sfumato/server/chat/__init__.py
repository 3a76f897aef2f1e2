"""What dialects share that ask for a reply: calls become requests, and replies become deltas."""
