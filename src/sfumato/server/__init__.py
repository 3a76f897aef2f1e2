"""HTTP over an engine: OpenAI's API, some of llama-server's, and the web page."""
