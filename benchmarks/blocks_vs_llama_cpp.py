"""A Qwen3 network of blocks against the same file read as a causal network by llama.cpp.

    .venv/bin/python benchmarks/random_checkpoint.py FILE.gguf --preset sdar-1.7b --format q8_0
    .venv/bin/python -m benchmarks.blocks_vs_llama_cpp FILE.gguf --llama FOLDER

llama.cpp knows no `diffusion.*` keys and reads the file as any `qwen3`, but for the key that says
that its attention is not causal, which is set to causal here. FOLDER holds its shared
libraries (`libllama*.so`, `libggml*.so` and the `libggml-cpu-*.so` of which it takes the best for
the processor), as `npm pack @node-llama-cpp/linux-x64` has them in bins/linux-x64. That both read
the same network is tested first: tokens that are encoded one at a time see none after them in
Sfumato either, and the last one's scores are compared.

Both programs then take turns, each in a process of its own. A round of llama.cpp is a prompt, and
tokens one after another, the most probable ones. A round of Sfumato is the same prompt, and replies
of as many tokens with each number of steps a block that divides the block: random weights say
nothing on how many tokens a step reveals, so the pace says it. A block of n tokens that takes s
steps costs s steps and one commit, its encoding, whose times are medians over the rounds;
n / (s * step + commit) tokens a second beside what whole replies came to. Prints tables, what other
programs took of the processors meanwhile, and one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.turns import Contender, OtherWork, in_turns

from sfumato.bench.environment import commit, cpu_name

CONTEXT = 512  # positions of both caches: what llama.cpp takes by default
ALONE = 16  # tokens that are compared
LOGITS = "logits"  # asks a program for the scores of the last of these
WORKER = "import sys; from benchmarks.blocks_vs_llama_cpp import {0}; {0}(*sys.argv[1:])"


def prompt_of(length: int, vocabulary: int) -> list[int]:
    """Some tokens, the same in both programs; the last ones of a vocabulary are special."""
    return [(7919 * i) % (vocabulary - 300) + 5 for i in range(length)]


class Anything(ctypes.Structure):
    """A struct of llama.cpp that is passed on as it came: larger than all of them, and therefore
    in memory in both directions, as the callee expects."""

    _fields_ = [("words", ctypes.c_uint64 * 128)]


_POINTER, _I32, _TEXT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (Anything, ()),
    "llama_context_default_params": (Anything, ()),
    "llama_model_load_from_file": (_POINTER, (_TEXT, Anything)),
    "llama_init_from_model": (_POINTER, (_POINTER, Anything)),
    "llama_set_n_threads": (None, (_POINTER, _I32, _I32)),
    "llama_set_causal_attn": (None, (_POINTER, ctypes.c_bool)),
    "llama_n_ctx": (ctypes.c_uint32, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (_I32, (_POINTER,)),
    "llama_batch_get_one": (Anything, (_POINTER, _I32)),
    "llama_decode": (_I32, (_POINTER, Anything)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_POINTER, _I32)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, ctypes.c_bool)),
    "llama_print_system_info": (_TEXT, ()),
}


class LlamaCpp:
    """llama.cpp by its C interface, with its own defaults."""

    def __init__(self, folder: Path, file: Path, threads: int) -> None:
        backends, self._library = (
            ctypes.CDLL(str(next(folder.glob(f"{name}.*so*"))), mode=ctypes.RTLD_GLOBAL)
            for name in ("libggml", "libllama")
        )
        self._silent = ctypes.CFUNCTYPE(None, ctypes.c_int, _TEXT, _POINTER)(lambda *_: None)
        self._library.llama_log_set(self._silent, None)
        backends.ggml_backend_load_all_from_path(str(folder).encode())
        self._library.llama_backend_init()
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        call = self._library
        default = call.llama_model_default_params()
        self._model = call.llama_model_load_from_file(str(file).encode(), default)
        if not self._model:
            raise SystemExit(f"llama.cpp does not read {file}")
        self._context = call.llama_init_from_model(self._model, call.llama_context_default_params())
        call.llama_set_n_threads(self._context, threads, threads)
        call.llama_set_causal_attn(self._context, True)  # `attention.causal` of the file says no
        assert call.llama_n_ctx(self._context) == CONTEXT
        self.vocabulary = call.llama_vocab_n_tokens(call.llama_model_get_vocab(self._model))

    def about(self) -> str:
        """The library that computes, and its instruction sets."""
        loaded = Path("/proc/self/maps").read_text().split()
        names = {Path(word).name for word in loaded if "libggml-cpu" in word}
        known: str = self._library.llama_print_system_info().decode()
        on = [part.split(" = ")[0].strip() for part in known.split("|") if part.strip()[-1:] == "1"]
        return f"{', '.join(sorted(names))} ({', '.join(on)})"

    def decode(self, tokens: list[int]) -> np.ndarray:
        """The scores float32 [vocabulary] of the token after these, which stay in the cache."""
        ids = (_I32 * len(tokens))(*tokens)
        batch = self._library.llama_batch_get_one(ids, len(tokens))
        if failure := self._library.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode: {failure}")
        scores = self._library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(scores, (self.vocabulary,))

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, and what it returns."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def causal(folder: str, file: str, threads: str, prompt: str, tokens: str) -> None:
    """The program that measures llama.cpp."""
    llama = LlamaCpp(Path(folder), Path(file), int(threads))
    ids = prompt_of(int(prompt), llama.vocabulary)
    for line in sys.stdin:
        llama.clear()
        if line.strip() == LOGITS:
            scores = llama.decode(ids[:ALONE])
            print(json.dumps([llama.about(), scores.tolist()]), flush=True)
            continue
        prefill, scores = seconds_of(lambda: llama.decode(ids))
        times = []
        for _ in range(int(tokens)):
            token = int(scores.argmax())
            taken, scores = seconds_of(lambda token=token: llama.decode([token]))
            times.append(taken)
        print(json.dumps({"prefill_s": prefill, "token_s": times}), flush=True)


def blocks(file: str, threads: str, prompt: str, tokens: str) -> None:
    """The program that measures Sfumato."""
    import torch
    from benchmarks.tokens_per_forward import paced_reply

    import sfumato
    from sfumato import Engine, EngineConfig, ops

    torch.set_num_threads(int(threads))
    model = sfumato.load(Path(file))
    network, size = model.network, model.config.canvas_length
    engine = Engine(model, EngineConfig(slots=1, context=CONTEXT, snapshot_bytes=0))
    ids = prompt_of(int(prompt), model.config.vocab_size)
    paces = [steps for steps in range(size, 0, -1) if size % steps == 0]
    for line in sys.stdin:
        if line.strip() == LOGITS:
            slot = network.new_slot(ALONE)
            for token in ids[:ALONE]:
                (hidden,) = network.encode_hidden([torch.tensor([token])], [slot])
            with torch.no_grad():
                scores = network.head.logits(hidden)[-1]
            print(json.dumps([[size, ops.backend], scores.tolist()]), flush=True)
            continue
        engine.reset_prefix_cache()  # so that the first reply encodes the prompt
        replies = {steps: paced_reply(engine, ids, int(tokens), steps) for steps in paces}
        print(json.dumps(replies), flush=True)


def distance(one: list[float], other: list[float]) -> float:
    """Of scores without their mean: relative L2."""
    a, b = (np.array(scores) - np.mean(scores) for scores in (one, other))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def figures(causal_rounds: list[Any], block_rounds: list[Any], size: int, prompt: int) -> Any:
    """Medians over the rounds, without the first."""
    theirs, ours = causal_rounds[1:], block_rounds[1:]
    paces = list(ours[0])
    middle = statistics.median
    step = middle(middle(each[pace]["step_s"]) for each in ours for pace in paces)
    commit_s = middle(each[pace]["commit_s"] for each in ours for pace in paces)
    token = middle(middle(each["token_s"]) for each in theirs)
    left = size * token - commit_s  # for the steps of a block that is as fast
    return {
        "llama_token_ms": 1e3 * token,
        "llama_tokens_per_s": 1 / token,
        "llama_prefill_tps": prompt / middle(each["prefill_s"] for each in theirs),
        "step_ms": 1e3 * step,
        "commit_ms": 1e3 * commit_s,
        "prefill_tps": prompt / middle(each[paces[0]]["prefill_s"] for each in ours),
        "break_even": size * step / left if left > 0 else None,
        "paces": {
            size / int(pace): {
                "tokens_per_s": size / (int(pace) * step + commit_s),
                "of_replies": 1 / middle(each[pace]["token_s"] for each in ours),
                "ratio": size * token / (int(pace) * step + commit_s),
                "of_rounds": sorted(
                    size
                    * middle(a["token_s"])
                    / (int(pace) * middle(b[pace]["step_s"]) + b[pace]["commit_s"])
                    for a, b in zip(theirs, ours, strict=True)
                ),
            }
            for pace in paces
        },
    }


def report(compared: Any) -> None:
    print("| | llama.cpp, causal | Sfumato, blocks | ratio |\n|---|---|---|---|")
    theirs, ours = compared["llama_prefill_tps"], compared["prefill_tps"]
    print(f"| reading a prompt, tok/s | {theirs:.0f} | {ours:.0f} | {ours / theirs:.2f}x |")
    print(f"| a forward, ms | {compared['llama_token_ms']:.1f} | {compared['step_ms']:.1f} | |")
    print(f"| a commit, ms | | {compared['commit_ms']:.1f} | |")
    for tokens, at in compared["paces"].items():
        print(
            f"| {tokens:g} tokens a step, tok/s | {compared['llama_tokens_per_s']:.1f} | "
            f"{at['tokens_per_s']:.1f} (replies: {at['of_replies']:.1f}) | **{at['ratio']:.2f}x** "
            f"(rounds: {at['of_rounds'][0]:.2f} to {at['of_rounds'][-1]:.2f}) |"
        )
    even = compared["break_even"]
    print("Never as fast." if even is None else f"As fast from {even:.2f} tokens a step on.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a GGUF file of a Qwen3 network of blocks")
    parser.add_argument("--llama", type=Path, required=True, help="the libraries of llama.cpp")
    parser.add_argument("--isa", help="Sfumato's level (SFUMATO_ISA); default: its own choice")
    parser.add_argument("--threads", type=int, default=2, help="of both (%(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a reply (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    options = parser.parse_args()
    sizes = options.file, options.threads, options.prompt, options.tokens
    environment = os.environ | ({"SFUMATO_ISA": options.isa} if options.isa else {})
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(Contender(WORKER.format(name), *arguments, environment=environment))
            for name, arguments in {"causal": (options.llama, *sizes), "blocks": sizes}.items()
        ]
        (library, exact), ((size, level), own) = (each.measure(LOGITS) for each in contenders)
        work = OtherWork(contenders)
        rounds = in_turns(contenders, options.rounds)
        others = work.share()
    compared = figures(*rounds, size, options.prompt)
    compared |= {"logits_l2": distance(own, exact), "other_work": others, "llama": library}
    report(compared)
    print(
        f"{cpu_name()}, {options.threads} threads; blocks of {size}; Sfumato: {level}; llama.cpp: "
        f"{library}; logits differ by {compared['logits_l2']:.1e} (relative L2); other programs "
        f"took {others:.0%} of the processors; load {os.getloadavg()[0]:.1f}."
    )
    about = {"benchmark": "blocks_vs_llama_cpp", "commit": commit(), "rounds": options.rounds}
    about |= {"gb": options.file.stat().st_size / 1e9, "prompt": options.prompt, "isa": level}
    print(json.dumps(about | {"tokens": options.tokens, **compared}))


if __name__ == "__main__":
    main()
