"""HTTP APIs for replies, a file or a package each: how bodies are parsed and replies rendered.

To add one, write a file with a `Dialect` (http/dialect.py) and list the value here. Typed decisions
have dialects of their own (http/decision_dialect.py), which decisions.py lists.
"""

from __future__ import annotations

from typing import Any

from sfumato.server.dialects.anthropic.messages import MESSAGES
from sfumato.server.dialects.decisions import ROUTES
from sfumato.server.dialects.fill import FILL
from sfumato.server.dialects.llama_cpp.completion import LLAMA_COMPLETION
from sfumato.server.dialects.llama_cpp.embeddings import LLAMA_EMBEDDINGS
from sfumato.server.dialects.llama_cpp.infill import INFILL
from sfumato.server.dialects.ollama.chat import OLLAMA_CHAT, OLLAMA_GENERATE
from sfumato.server.dialects.ollama.embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from sfumato.server.dialects.openai_chat import OPENAI_CHAT
from sfumato.server.dialects.openai_completions import OPENAI_COMPLETIONS
from sfumato.server.dialects.openai_embeddings import OPENAI_EMBEDDINGS
from sfumato.server.dialects.responses import RESPONSES
from sfumato.server.http.decision_route import DecisionRoute
from sfumato.server.http.dialect import Dialect

DIALECTS: tuple[Dialect[Any], ...] = (
    OPENAI_CHAT,
    OPENAI_COMPLETIONS,
    RESPONSES,
    LLAMA_COMPLETION,
    INFILL,
    FILL,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OPENAI_EMBEDDINGS,
    LLAMA_EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
)
DECISIONS: tuple[DecisionRoute, ...] = ROUTES
