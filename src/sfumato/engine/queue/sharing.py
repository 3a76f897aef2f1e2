"""Which waiting request lets another encode the beginning that their prompts share.

Several replies to one prompt, or requests that arrive together with one long system prompt, would
each encode the same tokens. All but the first wait for it instead, without a slot, and then take
the prefix over from its slot. Knows no tensors and no threads.
"""

from __future__ import annotations

from collections.abc import Iterable

from sfumato.engine.queue.slots import SlotPool
from sfumato.engine.row import Row

SHARED = 256  # tokens: encoding fewer costs less than the step that a follower starts later


class Sharing:
    """Finds the row that a waiting row follows."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool

    def waits(self, row: Row, running: Iterable[Row]) -> bool:
        """Whether a waiting row should wait for what one of the running rows encodes.

        Asked anew before each step: where the row that it followed has ended, it follows another
        one, or none. A row follows only rows that were given their slot before it, so one always
        moves.
        """
        ahead = [other for other in running if other.lease and other.encoded < other.prompt_tokens]
        if row.leader not in ahead:
            row.leader, row.shared = None, 0
            for other in ahead:
                shared = _shared(row, other)
                if shared < other.prompt_tokens and not self._pool.keeps_marks:
                    continue  # its slot will be past what can be taken over
                if shared > max(row.shared, other.encoded):
                    row.leader, row.shared = other, shared
            if row.leader and self._pool.reusable(row.cache_key) >= row.shared:
                row.leader = None  # some slot has it all already
        leader = row.leader
        if leader is None or leader.encoded >= row.shared:
            row.leader = None
            return False
        assert leader.lease
        leader.lease.stop_at(row.shared)
        return True


def _shared(row: Row, other: Row) -> int:
    """The tokens that two prompts begin with alike; 0 where they are too few to wait for."""
    common = row.cache_key.common(other.cache_key)
    shared = min(common, row.prompt_tokens, other.prompt_tokens)
    is_one_prompt = row.prompt is other.prompt
    return shared if is_one_prompt or shared >= SHARED else 0
