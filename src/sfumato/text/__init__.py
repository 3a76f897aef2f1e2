"""Text to token ids, messages to a prompt, a reply to thought, answer and tool calls.

Knows no tensors, no sampling and no requests.

- tokenizer.py  text and ids, from a tokenizer.json or from GGUF metadata; ids to text, streamed
- markers.py    the special tokens of a chat format by role; the parsers take them as a value
- messages.py   what callers send: messages and tools, checked and brought into one shape
- template.py   the checkpoint's chat template, sandboxed
- prompt.py     messages to prompt ids, with markers inside messages kept harmless
- reply.py      a reply, piece by piece, to thought, answer and tool calls, up to a stop string
- calls.py      the argument syntax of tool calls
- jsonscan.py   what is wrong with texts from outside: JSON of too many values, no valid Unicode
"""
