"""`sfumato batch`: the requests of a file, answered by an engine of its own.

What answers is the server's application, asked within this process: it has the routes, so that a
line means what the same request of a client means. Until all lines are answered, lines and results
are in a store beside the file of results, which then appears whole.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from contextlib import closing
from pathlib import Path

from sfumato import catalog
from sfumato.cli import generation, terminal
from sfumato.engine import EngineConfig, own_engine
from sfumato.refused import Refused
from sfumato.server.app import create_app
from sfumato.server.batches import Asking, Record, Store, answer, scan
from sfumato.server.models import Models
from sfumato.server.settings import ServerSettings
from sfumato.weights.files.atomic_write import atomic_path

_BATCH = "batch"  # the record of a store
_MOST_BYTES = 2**40  # of it
_ADVICE = "lower --slots or --context, or free some memory"


def main(args: argparse.Namespace) -> int:
    """Answer the lines that have no result yet. Raises ValueError or OSError for bad input."""
    out = Path(args.out)
    if out.exists():
        raise Refused("out", f"{out} exists already", "name another file")
    settings = ServerSettings(page=False, lenient=args.lenient)
    state = out.with_name(f"{out.name}.batch")
    with closing(_opened(args, state, settings)) as store:
        left, began = len(store.numbers(_BATCH, "left")), time.perf_counter()
        if left:
            _answer(args, store, settings, left)
        numbers = store.numbers(_BATCH)
        errors, nbytes = store.size(_BATCH, "error")
        nbytes += store.size(_BATCH, "output")[1]
        with atomic_path(out, nbytes) as part, part.open("wb") as file:
            file.writelines(store.line(_BATCH, number) for number in numbers)
    state.unlink()
    parts = [f"{left:,} of {len(numbers):,} lines answered in {time.perf_counter() - began:.1f} s"]
    parts += [f"{errors:,} results are errors"] * (errors > 0)
    terminal.print_message("note", "; ".join(parts))
    return 0


def _opened(args: argparse.Namespace, state: Path, settings: ServerSettings) -> Store:
    """The store of this input and model, with all its lines. Raises ValueError where it is
    another's, or a line is wrong, and OSError."""
    how = [getattr(args, key) for key in ("dtype", "activations", "quantize", "cache_type")]
    with open(args.file, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        made = {"input": digest, "weights": generation.weights_of(args), "how": how}
        file.seek(0)
        is_new, store = not state.exists(), Store(state, _MOST_BYTES)
        try:
            if not (known := store.records("batch")):
                store.put(Record(_BATCH, "", "batch", None, made), scan(file, settings))
            elif known[0].shown != made:
                raise ValueError(
                    f"{state}: has results of another input or model; name another file with "
                    "--out, or remove it"
                )
        except BaseException as error:
            store.close()
            if is_new:
                state.unlink()
            if isinstance(error, Refused):
                raise ValueError(f"{args.file}: {error}") from None
            raise
    return store


def _answer(args: argparse.Namespace, store: Store, settings: ServerSettings, left: int) -> None:
    """Answers the lines that are left. Raises ValueError where the engine does not go on."""
    model = generation.load(args)
    context = args.context or min(EngineConfig.context, model.config.context_length)
    engine = own_engine(model, EngineConfig(args.slots, context), _ADVICE)
    models, total = Models(catalog.shown_name(args.model), engine), len(store.numbers(_BATCH))
    done = total - left
    with terminal.progress("answering lines") as show, engine:

        def count_line() -> None:
            nonlocal done
            done += 1
            show(done, total)

        show(done, total)
        asking = Asking(
            create_app(models, settings),
            store,
            _BATCH,
            settings,
            at_a_time=2 * args.slots,  # as many wait as run, so that no slot is free for long
            is_over=lambda: models.death is not None,
            on_line=count_line,
        )
        asyncio.run(answer(asking))
    if models.death is not None:
        raise ValueError(f"{models.death}; the same command goes on")
