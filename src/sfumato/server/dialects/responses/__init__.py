"""OpenAI's responses: a body becomes a request, and a reply becomes items or events."""
