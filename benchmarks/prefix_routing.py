"""What a router by prefixes would find in the caches of replicas, beside one by sessions.

    PYTHONPATH=src .venv/bin/python -m benchmarks.prefix_routing

Replays conversations against replicas that have the engine's own slots and prefixes and no network:
shared system prompts and documents, turns, branches, edits, and conversations that go on under
another name; half of the clients name their session, the others have `session_of`'s. Prompts and
the lengths at which snapshots are taken are those of the embedded model's template. Only times are
assumed. Routers:

- round robin;
- sessions: the consistent hash of Ray Serve, as `sfumato deploy ray` has it;
- prefixes: the replica that shares the longest prefix with a prompt, where that is over half of the
  prompt, else the one with the fewest requests, as SGLang's router does; the prefixes are those of
  up to 10 s ago, in blocks of 64 tokens, or as the slots are when the request comes.

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from array import array
from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain, count, islice, product
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, cast

import torch

from sfumato.api import Model, load_outline
from sfumato.cli.terminal import table
from sfumato.deploy.engine_client import session_of
from sfumato.engine import Request
from sfumato.engine.prepare import snapshot_points_of
from sfumato.engine.queue.slots import CacheKey, Lease, SlotPool
from sfumato.model.cache import KVPool, snapshot_bytes
from sfumato.model.model_config import LayerConfig
from sfumato.server.gateways import PREFIX_BLOCK

CONTEXT = 8192
REPLICAS, SLOTS = 3, 16
SNAPSHOTS = 64  # of a replica
READ_S, WRITE_S = 1 / 4000, 1 / 256  # of a token of a prompt, and of a reply; assumed
THINK_S = 20.0  # between two turns, on average; assumed
VIEW_S = 10.0  # age of a router's view of prefixes at most, Ray's default
POINTS = 100  # of a replica on the ring of the consistent hash, as Ray's has it
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")


@dataclass(frozen=True)
class Turn:
    """A request of a conversation, and what it is answered."""

    key: CacheKey
    marks: tuple[int, ...]
    session: str
    reply: tuple[int, ...]
    think_s: float  # after the reply


def conversations(model: Model, rng: random.Random) -> Iterator[list[Turn]]:
    """Conversations without end."""
    points, tokenizer = snapshot_points_of(model), model.tokenizer

    def text(least: int, most: int) -> str:
        words = (rng.choice(WORDS) for _ in range(rng.randint(least, most)))
        return " ".join(words)

    systems = [text(50, 500) for _ in range(6)]
    documents = [text(300, 900) for _ in range(12)]

    def turn(messages: list[dict[str, Any]], name: str | None, reply: str) -> Turn:
        ids = model.prompt_ids(messages=messages)
        call = {} if name is None else {"x-session-id": name}
        request = Request(messages=list(messages), call=call)
        marks = points.lengths(ids, messages, False)
        answer = tuple(tokenizer.encode(reply))
        key = CacheKey("simulated", 0, array("i", ids))
        return Turn(key, marks, session_of(request), answer, rng.expovariate(1 / THINK_S))

    while True:
        messages = [{"role": "system", "content": rng.choice(systems)}] * (rng.random() < 0.7)
        name = None if rng.random() < 0.5 else str(rng.random())
        first = f"{rng.choice(documents)}\n\n" if rng.random() < 0.25 else ""
        turns = list[Turn]()
        for _ in range(min(12, 1 + int(rng.expovariate(1 / 5)))):
            messages = [*messages, {"role": "user", "content": first + text(5, 60)}]
            reply, first = text(20, 150), ""
            made = turn(messages, name, reply)
            if len(made.key.ids) + len(made.reply) > CONTEXT:
                break
            turns.append(made)
            messages = [*messages, {"role": "assistant", "content": reply}]
            chance = rng.random()
            users = [at for at, each in enumerate(messages) if each["role"] == "user"]
            if chance < 0.10:  # the last question, asked in other words
                messages = messages[: users[-1]]
            elif chance < 0.15:  # any question, in other words
                messages = messages[: rng.choice(users)]
            elif chance < 0.20 and name is not None:  # the same conversation in another place
                name = str(rng.random())
        if turns:
            yield turns


@dataclass(eq=False)
class Replica:
    """The slots of an engine, whose keys and values are a few bytes."""

    pool: SlotPool
    waiting: deque[tuple[float, Turn, deque[Turn]]] = field(default_factory=deque)
    running: int = 0
    view: list[CacheKey] = field(default_factory=list)  # what a router knows of it
    reads_until: float = 0.0  # prompts are read one after another

    @property
    def load(self) -> int:
        return self.running + len(self.waiting)

    @property
    def is_full(self) -> bool:
        return self.load >= 2 * SLOTS

    def publish(self) -> None:
        places = self.pool._places
        self.view = [replace(each.key, ids=each.held[:]) for each in places if each.held]

    def viewed(self, key: CacheKey) -> int:
        """Tokens of whole blocks that some slot held."""
        longest = max((key.common(each) for each in self.view), default=0)
        return longest // PREFIX_BLOCK * PREFIX_BLOCK


def replica(model: Model) -> Replica:
    layers = tuple(LayerConfig(sliding, 1, 2, 1e4, 1) for sliding in (True, False))
    config = replace(model.config, layers=layers, sliding_window=1024, context_length=CONTEXT)

    def slots(number: int, capacity: int) -> Any:
        return KVPool(config, number, capacity, torch.float16, torch.device("cpu")).slots()

    network = SimpleNamespace(config=config, cache_dtype=torch.float16, new_slots=slots)
    room = SNAPSHOTS * snapshot_bytes(config, CONTEXT, torch.float16)
    return Replica(SlotPool(cast(Any, network), SLOTS, CONTEXT, True, room, lambda *_: None))


Router = Callable[[Sequence[Replica], Turn], int]


def in_turn() -> Router:
    numbers = count()
    return lambda replicas, turn: next(numbers) % len(replicas)


def _point(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8])


def by_session() -> Router:
    ring = sorted((_point(f"{r}:{at}"), r) for r in range(REPLICAS) for at in range(POINTS))

    def choose(replicas: Sequence[Replica], turn: Turn) -> int:
        at = bisect(ring, (_point(turn.session), -1))
        numbers = (ring[(at + each) % len(ring)][1] for each in range(len(ring)))
        return next((n for n in numbers if not replicas[n].is_full), ring[at % len(ring)][1])

    return choose


def by_prefix(shared: Callable[[Replica, CacheKey], int]) -> Router:
    def choose(replicas: Sequence[Replica], turn: Turn) -> int:
        free = [n for n, each in enumerate(replicas) if not each.is_full] or range(len(replicas))
        lengths = {n: shared(replicas[n], turn.key) for n in free}
        best = max(free, key=lambda n: (lengths[n], -replicas[n].load))
        if lengths[best] > len(turn.key.ids) / 2:
            return best
        return min(free, key=lambda n: replicas[n].load)

    return choose


ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": in_turn,
    "sessions": by_session,
    "prefixes, 10 s old": lambda: by_prefix(Replica.viewed),
    "prefixes, fresh": lambda: by_prefix(lambda each, key: each.pool.reusable(key)),
}


@dataclass
class Served:
    """A turn that a replica has begun."""

    replica: Replica
    turn: Turn
    left: deque[Turn]  # of the conversation
    lease: Lease

    def encode(self, ids: Sequence[int]) -> None:
        self.lease.slot.advance(len(ids))
        self.lease.extend(ids)

    def read(self) -> None:
        ids, slot = self.turn.key.ids, self.lease.slot
        for stop in self.lease.marks:
            self.encode(ids[slot.length : stop])
            self.lease.pool.mark(self.lease)
        self.encode(ids[slot.length :])


class Replay:
    """One trace with one router."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self.replicas, self.router = replicas, router
        self.cached = self.prompts = 0  # tokens
        self.first_s: list[float] = []  # from a request to its first token
        self.counts: Counter[int] = Counter()  # requests of each replica
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def run(self, users: int, trace: Sequence[Sequence[Turn]]) -> None:
        """So many users have the conversations of a trace, one after another each."""
        self._trace, view_at = deque(trace), 0.0
        for number in range(users):
            self._at(THINK_S * number / users, partial(self._ask, deque()))
        while self._due:
            now, _, what = heapq.heappop(self._due)
            if now >= view_at:
                view_at = now + VIEW_S
                for each in self.replicas:
                    each.publish()
            what(now)

    def _at(self, time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), what))

    def _ask(self, left: deque[Turn], now: float) -> None:
        if not left and not self._trace:
            return
        left = left or deque(self._trace.popleft())
        number = self.router(self.replicas, left[0])
        self.counts[number] += 1
        self.replicas[number].waiting.append((now, left.popleft(), left))
        self._begin(self.replicas[number], now)

    def _begin(self, replica: Replica, now: float) -> None:
        while replica.waiting and replica.running < SLOTS:
            since, turn, left = replica.waiting.popleft()
            tokens = len(turn.key.ids)
            lease = replica.pool.lease(turn.key, tokens + len(turn.reply), turn.marks)
            assert lease is not None
            replica.running += 1
            self.cached += lease.cached
            self.prompts += tokens
            begun = max(now, replica.reads_until)
            replica.reads_until = begun + READ_S * (tokens - lease.cached)
            self.first_s.append(replica.reads_until - since)
            self._at(replica.reads_until, partial(self._read, Served(replica, turn, left, lease)))

    def _read(self, served: Served, now: float) -> None:
        served.read()
        self._at(now + WRITE_S * len(served.turn.reply), partial(self._end, served))

    def _end(self, served: Served, now: float) -> None:
        served.encode(served.turn.reply)
        served.replica.pool.release(served.lease, keep=True)
        served.replica.running -= 1
        self._at(now + served.turn.think_s, partial(self._ask, served.left))
        self._begin(served.replica, now)


def ceiling(trace: Sequence[Sequence[Turn]]) -> float:
    """The share of prompts that one cache without bounds would give."""
    seen, cached, total = list[CacheKey](), 0, 0
    for turn in chain.from_iterable(trace):
        longest = 0
        for each in seen:
            if turn.key.may_share_beyond(each, longest):
                longest = max(longest, turn.key.common(each))
        cached, total = cached + longest, total + len(turn.key.ids)
        seen.append(replace(turn.key, ids=turn.key.ids + array("i", turn.reply)))
    return cached / total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--users", type=int, nargs="+", default=[24, 96, 192])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    model, cases = load_outline(), defaultdict[tuple[int, str], list[tuple[float, ...]]](list)
    requests, ceilings = 0, list[float]()
    for seed in range(options.seeds):
        trace = list(islice(conversations(model, random.Random(seed)), options.conversations))
        requests += sum(map(len, trace))
        ceilings.append(ceiling(trace))
        for users, (name, router) in product(options.users, ROUTERS.items()):
            replay = Replay([replica(model) for _ in range(REPLICAS)], router())
            replay.run(users, trace)
            assert len(replay.first_s) == sum(map(len, trace)), "each request is answered"
            late = quantiles(replay.first_s, n=20)[-1]
            busiest = max(replay.counts.values()) / replay.counts.total()
            measured = replay.cached / replay.prompts, median(replay.first_s), late, busiest
            cases[users, name].append(tuple(round(each, 4) for each in measured))
    rows = [("users", "router", "from caches", "first token, median", "95%", "busiest replica")]
    for (users, name), of in cases.items():
        cached, first, late, busiest = (median(each) for each in zip(*of, strict=True))
        shown = f"{cached:.1%}", f"{first:.2f} s", f"{late:.2f} s", f"{busiest:.0%}"
        rows.append((str(users), name, *shown))
    print("\n".join(table(rows)))
    ceilings = [round(each, 4) for each in ceilings]
    by_case = {f"{users} users, {name}": of for (users, name), of in cases.items()}
    print(json.dumps({"requests": requests, "one endless cache": ceilings, **by_case}))


if __name__ == "__main__":
    main()
