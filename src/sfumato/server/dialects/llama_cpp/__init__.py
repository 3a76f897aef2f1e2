"""llama-server's API: completions, infill and embeddings."""
