"""`sfumato verify-model`, on the embedded model."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sfumato import catalog
from sfumato.catalog import EMBEDDED
from sfumato.cli import verify
from sfumato.weights.files.safetensors import read_safetensors


def test_the_answers_are_the_same_every_time(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = "What is the capital of France?", "What is the capital of Italy?"  # of few steps
    monkeypatch.setattr(verify, "PROMPTS", prompts)
    done = cli("verify-model", "--json")
    first = json.loads(done.out)
    assert done.code == 0
    assert first["answers"][0]["text"] == "The capital is Paris."
    for each in first["answers"]:
        assert each["sha256"] == hashlib.sha256(each["text"].encode()).hexdigest()
    joined = "\n".join(each["sha256"] for each in first["answers"])
    assert first["sha256"] == hashlib.sha256(joined.encode()).hexdigest()
    assert first["tensors"] > 100 and first["settings"]["temperature"] == 0
    plain = cli("verify-model", "embedded").out
    assert f"all five: sha256 {first['sha256']}" in plain
    assert "there is nothing to report" in plain
    quantized = json.loads(cli("verify-model", "--json", "--quantize", "q8_0").out)
    assert (quantized["quantize"], quantized["weights"]) == ("q8_0", first["weights"])


def test_a_model_with_a_tensor_too_many_or_too_few_is_refused(cli: Any, tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    name = next(n for n in json.loads(data[8 : 8 + header]) if n.endswith("input_layernorm.weight"))
    file.write_bytes(data.replace(name.encode(), name.replace("input", "other").encode(), 1))
    assert read_safetensors(file)
    refused = cli("verify-model", str(tmp_path / "m"))
    assert refused.code == 2 and refused.out == "" and "layernorm" in refused.err


@pytest.mark.parametrize("reported", ["", "same", "other"])
def test_what_to_do_with_the_report(monkeypatch: pytest.MonkeyPatch, reported: str) -> None:
    entry = replace(catalog.FIRST, verified={"same": "abc"}.get(reported, reported))
    findings = {"model": entry.name, "sha256": "abc", "published": True}
    (words,) = verify._next(findings | {"reported": entry.verified or None})
    if not reported:
        assert f"{entry.name} is {catalog.NOT_VERIFIED}" in words and verify.FORM in words
        form = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE" / "model.yml"
        assert "name: A model was verified\n" in form.read_text(encoding="utf-8")
    else:
        assert ("differ" in words) == (reported == "other")
