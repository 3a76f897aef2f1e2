"""What several dialects have in common: OpenAI's messages and objects, sampling fields, log
probabilities."""
