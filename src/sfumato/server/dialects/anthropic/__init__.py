"""Anthropic's API: messages, whole and streamed, and the count of a prompt's tokens."""
