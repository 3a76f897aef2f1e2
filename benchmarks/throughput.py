"""Eight clients at once against one request at a time: what batching gives, and who waits.

    .venv/bin/python -m benchmarks.throughput --threads 2 [--preset 180m] [--clients 8] [--rounds 5]

Random weights, and a sampler that takes a fixed number of steps, so that both ways do the same
work. "together": all requests are submitted at once to an engine with a slot for each; "in turn":
the same requests to an engine with one slot, so that each waits for those before it. Rounds are
interleaved, and a first request of each is not counted. Waits are from submission, p50 and p95
over the requests of a round; figures, and ratios within a round, are medians over rounds. Prints a
table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from benchmarks.random_checkpoint import vocabulary

from sfumato.api import Model, TextSide
from sfumato.bench.random_weights import PRESETS, random_checkpoint
from sfumato.bench.summary import percentile
from sfumato.diffusion.config import REFERENCE, fixed_steps
from sfumato.engine import Engine, EngineConfig, Finished, Request
from sfumato.model.loading import load_network
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer

WAITS = ("first_draft_s", "total_s")


def random_model(preset: str, format: str, device: str, dtype: str) -> Model:
    """Random weights with a made-up vocabulary; no token ends a reply."""
    checkpoint = random_checkpoint(preset, format)
    target = pick_device(device)
    network = load_network(checkpoint, target, pick_dtype(dtype, checkpoint, target))
    metadata = vocabulary(network.config.vocab_size, None)
    text = TextSide(Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata))
    return Model(network, text, REFERENCE, (), Path(f"random-{preset}"))


def requests(model: Model, options: argparse.Namespace, round_: int) -> list[Request]:
    """One of each client. No prompt is like another, of this round or of others."""
    random = torch.Generator().manual_seed(round_)
    size = (options.clients, options.prompt_tokens)
    prompts = torch.randint(model.config.vocab_size, size, generator=random).tolist()
    tokens, sampler = options.canvases * model.config.canvas_length, fixed_steps(options.steps)
    return [
        Request(ids=ids, max_tokens=tokens, seed=seed, sampler=sampler)
        for seed, ids in enumerate(prompts)
    ]


def one_round(engine: Engine, asked: list[Request]) -> dict[str, float]:
    """All submitted at once: the speed of all together, and each one's waits."""
    start = time.perf_counter()
    handles = [engine.submit(request) for request in asked]
    while engine.step():
        pass
    wall = time.perf_counter() - start
    accounts = []
    for handle in handles:
        assert isinstance(handle.terminal, Finished), handle.terminal
        accounts.append(handle.terminal.account)
    found = {"canvas_tps": sum(account.canvas_tokens for account in accounts) / wall}
    for name in WAITS:
        waits = [getattr(account, name) for account in accounts]
        for share in (50, 95):
            found[f"{name.removesuffix('_s')}_p{share}_s"] = percentile(waits, share / 100)
    return found


def measure(model: Model, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The figures of both ways, and the ratio of the first to the second in the same round."""
    context = options.prompt_tokens + options.canvases * model.config.canvas_length
    engines = {
        name: Engine(model, EngineConfig(slots=slots, context=context, queue=options.clients))
        for name, slots in {"together": options.clients, "in turn": 1}.items()
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(options.rounds + 1):
        for name, engine in engines.items():
            asked = requests(model, options, number)
            if number:
                rounds[name].append(one_round(engine, asked))
            else:  # one request warms up
                one_round(engine, asked[:1])
    for engine in engines.values():
        engine.close()
    together, in_turn = rounds.values()
    ratios = [{key: a[key] / b[key] for key in a} for a, b in zip(together, in_turn, strict=True)]
    return {name: medians(found) for name, found in {**rounds, "ratio": ratios}.items()}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="180m", help="sizes (%(default)s)")
    parser.add_argument("--format", default="bf16", help="of the weights (%(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--canvases", type=int, default=2, help="of each reply (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of each canvas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = random_model(options.preset, options.format, options.device, options.dtype)
    found = measure(model, options)
    dtype, device = str(model.network.dtype).removeprefix("torch."), model.network.device
    print(
        f"random {options.preset}, {options.format}, {dtype} on {device}, {options.threads} "
        f"threads; {options.clients} clients, {options.canvases} canvases of {options.steps} steps"
    )
    together, in_turn, ratio = found.values()
    print(f"{'':22}{'together':>10}{'in turn':>10}{'ratio':>9}")
    for name in together:
        print(f"{name:22}{together[name]:10.2f}{in_turn[name]:10.2f}{ratio[name]:8.2f}x")
    print(json.dumps({"benchmark": "throughput", **vars(options), "figures": found}))


if __name__ == "__main__":
    main()
