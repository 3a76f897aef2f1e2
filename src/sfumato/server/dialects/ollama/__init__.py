"""Ollama's API: chats, completions, and what its clients ask of the model."""
