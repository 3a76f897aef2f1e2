"""`sfumato verify-model`: whether a checkpoint loads with every tensor used and every shape as its
config says, and five fixed answers with their hash, for a report on published weights.

Where Sfumato is developed there are no published weights. The catalogue says so of a model until a
user has reported what this command prints.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

from sfumato import catalog, hub
from sfumato.api import Model
from sfumato.bench.environment import environment
from sfumato.cli import generation
from sfumato.cli.terminal import print_report, wrapped
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import open_checkpoint

PROMPTS = (
    "What is the capital of France?",
    "Write the numbers from one to ten.",
    "Translate into German: Good morning, my friend.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three primary colours.",
)
MAX_TOKENS, SEED = 48, 0
FORM = "an issue of Sfumato's repository, with the form 'A model was verified'"


def main(args: argparse.Namespace) -> int:
    """Load, answer, and print. Raises ValueError or OSError where the model does not load."""
    args.model = args.path
    model = generation.load(args)  # refuses what is left over, missing, or of another shape
    name = getattr(args, "asked_for", None) or model.path.name
    findings = facts(model, name)
    print_report(args.json, findings, report(findings))
    return 0


def facts(model: Model, name: str) -> dict[str, Any]:
    """What is to be reported, as plain values."""
    identity, checkpoint = model.identity, open_checkpoint(model.path)
    answers = [answer(model, prompt) for prompt in PROMPTS]
    meant = hub.parse(name) if catalog.is_name(name) else None
    entry = catalog.find(meant.repo, meant.file) if meant is not None else None
    return {
        "model": name,
        "family": model.family.name,
        "kind": checkpoint.kind,
        "tensors": len(checkpoint.tensors),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "weights": identity.weights,
        "computed_in": identity.dtype,
        "activations": identity.activations,
        "quantize": identity.quantize or None,
        "device": str(model.network.device),
        "load_s": round(model.load_s, 1),
        "environment": environment(),
        "settings": {"seed": SEED, "temperature": 0, "max_tokens": MAX_TOKENS},
        "answers": answers,
        "sha256": digest("\n".join(each["sha256"] for each in answers)),
        "reported": (entry.verified or None) if entry is not None else None,
        "published": entry is not None,
    }


def answer(model: Model, prompt: str) -> dict[str, Any]:
    """The fixed answer to one prompt, with the hash of its text."""
    reply = model.generate(
        prompt, max_tokens=MAX_TOKENS, seed=SEED, sampler=SamplerConfig(temperature=0.0)
    )
    text = reply.text
    return {"prompt": prompt, "text": text, "stop": reply.stop_reason, "sha256": digest(text)}


def digest(text: str) -> str:
    """SHA-256 of a text's UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def report(findings: dict[str, Any]) -> list[str]:
    """The same as lines for people."""
    where = {key: value for key, value in findings["environment"].items() if value}
    how = [findings["computed_in"], f"activations {findings['activations']}"]
    how += [f"--quantize {findings['quantize']}"] if findings["quantize"] else []
    lines = [
        f"{findings['model']}: loads; all of {findings['tensors']} tensors are used, with the "
        "shapes that its config says",
        f"family {findings['family']}, {findings['kind']}, weights {findings['weights']}",
        f"in {', '.join(how)} on {findings['device']}, loaded in {findings['load_s']} s",
        *(f"{key}: {value}" for key, value in where.items()),
    ]
    lines = [wrapped(line) for line in lines]
    for number, each in enumerate(findings["answers"], 1):
        lines.append(wrapped(f"{number}. {each['prompt']}"))
        lines.append(wrapped(repr(each["text"]), "   ", "   "))
        lines.append(f"   sha256 {each['sha256']}")  # in one piece, to be copied
    lines.append(f"all five: sha256 {findings['sha256']}")
    return [*lines, "", *map(wrapped, _next(findings))]


def _next(findings: dict[str, Any]) -> list[str]:
    """What to do with the report."""
    if (reported := findings["reported"]) is not None:
        same = reported == findings["sha256"]
        return [
            "The answers are those that were reported."
            if same
            else f"The answers differ from those that were reported ({reported}): other kernels, "
            "another dtype or quantization may be why. Please report answers that make no sense."
        ]
    if not findings["published"]:
        return ["The catalogue does not list this model: there is nothing to report."]
    return [
        f"{findings['model']} is {catalog.NOT_VERIFIED}. Please read the answers: do they make "
        f"sense? Then send all of the above in {FORM}."
    ]
