"""Models by the name that a hub has them under, against a stand-in for the hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sfumato
from sfumato import catalog, hub
from sfumato.catalog import EMBEDDED
from sfumato.cli import pull, resolve_models
from sfumato.engine.memory.device_memory import Budget
from sfumato.model import families
from sfumato.model.families import FAMILIES, Family
from sfumato.refused import Refused
from sfumato.weights.checkpoint import INDEX, locate
from sfumato.weights.errors import CheckpointError

from .conftest import Q4, REPO
from .stand_in import REVISION, StandIn


def test_a_name_becomes_a_path_that_is_found_again_without_the_hub(
    hub_server: StandIn, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli("pull", f"hf:{REPO}:Q4_K_M")
    path = Path(done.out.strip())
    assert (done.code, path.name) == (0, Q4)
    assert path.read_bytes() == hub_server.repos[REPO][Q4]
    assert f"sfumato: downloading {Q4}\nsfumato: 4 kB (" in done.err
    assert re.search(r"of disk free\); running it takes 600 MB \(\S+ \S+ free\)", done.err)
    assert cli("pull", f"{REPO}:q4_k_m").out.strip() == str(path)  # "hf:" may be left out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    args = SimpleNamespace(model=f"hf:{REPO}:Q4_K_M", name=None)
    pull.resolve(args, "model")  # type: ignore[arg-type]
    assert (args.model, args.name) == (str(path), Q4)
    again = cli("pull", f"hf:{REPO}:Q4_K_M")
    assert (again.code, again.out.strip()) == (0, str(path))
    assert "it was downloaded before" in again.err
    assert "HF_HUB_OFFLINE is set" in cli("pull", f"hf:{REPO}:Q8_0").err
    assert hub.local(hub.parse(f"hf:{REPO}:Q4")) is None  # it takes the hub to know that it is one
    assert [name for name, _ in hub_server.sent] == [Q4]


def test_a_name_of_the_catalogue_is_a_repository(
    hub_server: StandIn, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `pull`, for options of other commands, and for `load`, which downloads nothing."""
    name, entry = catalog.FIRST.name, catalog.FIRST
    with pytest.raises(Refused, match=rf"^path: {name} \({re.escape(entry.offer)}\) is not on"):
        sfumato.load(name)
    monkeypatch.setattr(families, "FAMILIES", (replace(FAMILIES[0], model_type="sdar"),))
    files = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    hub_server.repos[entry.repo] = files
    hub_server.about[entry.repo] = {"config": {"model_type": entry.model_type}}
    path = cli("pull", name.upper()).out.strip()
    count = len(hub_server.sent)
    assert Path(path).parents[1] == hub.cache_folder(entry.repo)
    args = SimpleNamespace(model=name, quantize="q8_0", name=None)
    resolve_models(args)  # type: ignore[arg-type]
    assert (args.model, args.name, args.asked_for) == (path, name, name)
    assert sfumato.load(name).path == sfumato.load(f"hf:{entry.repo}").path == Path(path)
    assert len(hub_server.sent) == count
    # A path of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: holds no weights"):
        sfumato.load(name)
    args = SimpleNamespace(model=name)
    resolve_models(args)  # type: ignore[arg-type]
    assert args.model == name


def test_a_vision_tower_comes_with_a_gguf_file(hub_server: StandIn, cli: Any) -> None:
    files = {Q4: b"GGUF" * 1000} | {f"mmproj-{n}.gguf": n.encode() for n in ("Q8_0", "F32", "F16")}
    parts = {f"q/tiny-Q8_0-0000{n}-of-00002.gguf": b"GGUF" * n for n in (1, 2)}
    files |= parts | {"other/mmproj-BF16.gguf": b"x"}
    hub_server.repos["someone/seeing"] = files
    done = cli("pull", "hf:someone/seeing:Q4_K_M")
    path = Path(done.out.strip())
    assert path.name == Q4
    assert f"sfumato: downloading mmproj-F16.gguf and {Q4}\n" in done.err
    assert sorted(item.name for item in path.parent.iterdir()) == ["mmproj-F16.gguf", Q4]
    count = len(hub_server.sent)
    assert count == 2 and cli("pull", "hf:someone/seeing:Q4_K_M").out.strip() == str(path)
    # Of a file in parts, that of the folder above is read.
    path = Path(cli("pull", "hf:someone/seeing:Q8_0").out.strip())
    assert [file.read_bytes() for file in locate(path)[1]] == list(parts.values())
    tower = cli("pull", "hf:someone/seeing:mmproj-Q8_0").out.strip()
    assert (Path(tower).read_bytes(), len(hub_server.sent)) == (b"Q8_0", count + 3)
    args = SimpleNamespace(model="m.gguf", mmproj="hf:someone/seeing:mmproj-Q8_0.gguf", name=None)
    pull.resolve(args, "mmproj")  # type: ignore[arg-type]
    assert vars(args) == {"model": "m.gguf", "mmproj": tower, "name": None}


def test_all_parts_of_a_file_are_had(hub_server: StandIn, cli: Any) -> None:
    parts = {f"q/tiny-Q8_0-0000{n}-of-00002.gguf": b"GGUF" * n for n in (1, 2)}
    hub_server.repos["someone/split"] = parts | {"tiny-Q4_0.gguf": b"x"}
    path = Path(cli("pull", "hf:someone/split:Q8_0").out.strip())
    assert path.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert [file.read_bytes() for file in locate(path)[1]] == list(parts.values())
    again = cli("pull", "hf:someone/split:tiny-Q8_0-00002-of-00002.gguf")
    assert (again.out.strip(), len(hub_server.sent)) == (str(path), 2)


def test_a_folder_of_safetensors_answers(hub_server: StandIn, cli: Any, tmp_path: Path) -> None:
    """The embedded model, as a repository, from its name to an answer; in a process of its own,
    which knows the hub by its environment."""
    files = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    hub_server.repos["someone/tiny"] = files | {"README.md": b"#", "pytorch_model.bin": b"no"}
    hub_server.about["someone/tiny"] = {"config": {"model_type": "diffusion_gemma"}}
    where = {"HF_ENDPOINT": hub_server.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    offline = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "sfumato", "run", "-m", "hf:someone/tiny", "Capital of France?"],
        env={**os.environ, **where, **offline, "HF_TOKEN_PATH": str(tmp_path / "token")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "sfumato: downloading 6 files of someone/tiny" in done.stderr
    fetched = {name for name, _ in hub_server.sent}
    assert "model.safetensors" in fetched
    assert not fetched & {"README.md", "pytorch_model.bin"}
    count = len(hub_server.sent)
    assert cli("inspect", "hf:someone/tiny").code == 0
    assert len(hub_server.sent) == count


def test_an_interrupted_download_goes_on(
    hub_server: StandIn, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.repos[REPO][Q4] = bytes(range(256)) * 400

    def given_up(*_: object) -> None:
        raise KeyboardInterrupt

    hub_server.cut = 60_000
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", given_up)
    stopped = cli("pull", f"hf:{REPO}:Q4_K_M")
    assert stopped.code == 130
    assert "the same command continues the download" in stopped.err
    hub_server.cut = None
    done = cli("pull", f"hf:{REPO}:Q4_K_M")
    assert done.code == 0, done.err
    held = hub_server.sent[-1][1]
    assert held is not None and re.fullmatch(r"bytes=[1-9]\d*-", held)
    assert re.search(r"sfumato: [\d.]+ kB of 102 kB \(", done.err)
    assert Path(done.out.strip()).read_bytes() == hub_server.repos[REPO][Q4]


def test_a_damaged_part_is_not_taken(hub_server: StandIn, cli: Any) -> None:
    listing = pull.remote(hub.parse(f"hf:{REPO}"))
    part = pull._blob(listing, Q4).with_suffix(".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"else")
    done = cli("pull", f"hf:{REPO}:Q4_K_M")
    assert done.code == 2
    assert "damaged; it is removed, try again" in done.err
    assert cli("pull", f"hf:{REPO}:Q4_K_M").code == 0


def test_a_first_download_is_compared_with_its_hash(
    hub_server: StandIn, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(library: Any, listing: Any, name: str, file: Any, held: int) -> None:
        file.write(bytes(listing.sizes[name]))

    with monkeypatch.context() as patched:
        patched.setattr(pull, "_stream", damaged)
        done = cli("pull", f"hf:{REPO}:Q4_K_M")
    assert done.code == 2 and "damaged; it is removed, try again" in done.err
    assert cli("pull", f"hf:{REPO}:Q4_K_M").code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:someone/absent", "no such repository, or it is private"),
        (f"hf:{REPO}", r"holds 2 GGUF files; there are tiny-Q4_K_M.gguf \(4 kB\), tiny-Q8_0.g"),
        (f"hf:{REPO}:Q5_K_M", r"no such file; there are tiny-Q4_K_M.gguf \(4 kB\), .*name one"),
        (f"hf:{REPO}:tiny", "2 files match"),
        ("hf:someone", "is no name of a model; write hf:owner/name"),
        ("foo", "error: 'foo': is no name of a model; write hf:owner/name"),
        ("sdar-1.8b", "is no name of a model; the nearest name is 'sdar-1.7b'; write hf:"),
        (f"hf:{REPO}:../x", "is no name of a model"),
        ("hf:someone/split", r"1 of 2 parts are missing .*\(a-00002-of-00002.gguf\)"),
        ("hf:someone/text", r"holds no weights to read; there are README.md \(1 B\)"),
        ("hf:someone/gated", "is gated; accept its terms at https://.*then log in with `hf auth"),
        (
            "hf:someone/llama",
            "the model is a 'llama', not a diffusion-gemma or .*No weights were downl",
        ),
        ("hf:someone/awq", "quantized by 'awq', which is not read; take hf:unsl"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_to_do(
    hub_server: StandIn, cli: Any, name: str, words: str
) -> None:
    weights = {"model.safetensors": b"x" * 10, "config.json": b"{}"}
    hub_server.repos["someone/split"] = {"a-00001-of-00002.gguf": b"x"}
    hub_server.repos["someone/text"] = {"README.md": b"#"}
    hub_server.repos["someone/gated"] = hub_server.repos["someone/llama"] = weights
    hub_server.repos["someone/awq"] = weights
    hub_server.gated.add("someone/gated")
    hub_server.about["someone/llama"] = {"config": {"model_type": "llama"}}
    method = {"quantization_config": {"quant_method": "awq"}}
    hub_server.about["someone/awq"] = {"config": {"model_type": "diffusion_gemma"} | method}
    done = cli("pull", name)
    assert done.code == 2
    assert re.search(words, done.err.splitlines()[-1]), done.err
    assert hub_server.sent == []


@pytest.mark.parametrize(("method", "share"), [("compressed-tensors", 1.07), ("modelopt", 1.5)])
def test_narrow_repositories_are_readable(method: str, share: float) -> None:
    """With what is beside their weights, and the memory that their blocks take."""
    sizes = {"hf_quant_config.json": 99, "config.json": 99, "model.safetensors": 10**9}
    listing = hub.Listing("a/b", REVISION, sizes, quantized=method)
    assert pull._unreadable(listing) == []
    names = hub.choose(listing, hub.Reference("a/b"))
    assert set(names) == set(sizes)
    assert pull.memory(listing, names, None) == pytest.approx(share * 10**9 + catalog.MARGIN)


@pytest.mark.parametrize("beside", [False, True], ids=["compressed-tensors", "modelopt"])
def test_a_scheme_that_is_not_read_is_refused_before_the_weights(
    hub_server: StandIn, cli: Any, beside: bool
) -> None:
    weights = {"weights": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}}
    groups = {"config_groups": {"group_0": weights}, "format": "pack-quantized"}
    config: dict[str, Any] = {"model_type": "diffusion_gemma"}
    files = {"model.safetensors": b"x" * 10}
    if beside:
        files["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "W4A8_AWQ"}}'
    else:
        config["quantization_config"] = {"quant_method": "compressed-tensors"} | groups
    hub_server.repos["someone/odd"] = files | {"config.json": json.dumps(config).encode()}
    hub_server.about["someone/odd"] = {"config": config}
    done = cli("pull", "hf:someone/odd")
    refusal = "quant_algo is 'W4A8_AWQ'" if beside else "3 bits of type 'int' are not read"
    assert done.code == 2 and refusal in done.err and "No weights were downloaded" in done.err
    assert "model.safetensors" not in {name for name, _ in hub_server.sent}


def test_json_that_would_not_be_read_is_not_downloaded() -> None:
    sizes = {"config.json": 99, "model.safetensors.index.json": (16 << 20) + 1}
    (reason,) = pull._unreadable(hub.Listing("a/b", REVISION, sizes))
    assert reason.startswith("model.safetensors.index.json has")
    assert reason.endswith("above the limit of 16 MiB")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_repository_of_each_family_that_can_be_run_is_readable(family: Family) -> None:
    """By the name that its GGUF files say, and by that of its config.json."""
    for name in (family.architecture, family.model_type):
        assert pull._unreadable(hub.Listing("a/b", REVISION, {}, architecture=name)) == []


def test_a_new_family_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = hub.Listing("a/b", REVISION, {}, architecture="toy-diffusion")
    assert pull._unreadable(listing)
    toy = replace(FAMILIES[0], architecture="toy-diffusion")
    monkeypatch.setattr(families, "FAMILIES", (*FAMILIES, toy))
    assert pull._unreadable(listing) == []


def test_the_safetensors_that_a_folder_would_be_read_by() -> None:
    """What else lies in the repository stays there."""

    def chosen(*names: str, file: str | None = None) -> list[str]:
        listing = hub.Listing("a/b", REVISION, dict.fromkeys(names, 1))
        return hub.choose(listing, hub.Reference("a/b", file))

    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert chosen("config.json", INDEX, *shards, "consolidated.safetensors", "x.gguf") == [
        *("config.json", INDEX, *shards)
    ]
    assert chosen("a.safetensors", "model.safetensors") == ["model.safetensors"]
    assert chosen("a.safetensors", "b.safetensors", file="a.safetensors") == ["a.safetensors"]
    with pytest.raises(ValueError, match=r"2 safetensors files and no .*; there are a.safetens"):
        chosen("a.safetensors", "b.safetensors")


def test_a_servers_name_of_its_model_is_left_alone() -> None:
    args = SimpleNamespace(model="hf:a/b", url="http://127.0.0.1:1/v1")
    resolve_models(args)  # type: ignore[arg-type]
    assert args.model == "hf:a/b"


def test_a_hub_out_of_reach(hub_server: StandIn, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_server.status = 503
    assert "the hub answered 503; try again later" in cli("pull", f"hf:{REPO}").err
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    done = cli("run", "-m", f"hf:{REPO}", "Hi")
    assert done.code == 2
    assert "the hub cannot be reached" in done.err


@pytest.mark.parametrize("short", ["disk", "memory"])
def test_what_does_not_fit_is_not_downloaded(
    hub_server: StandIn, cli: Any, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    if short == "disk":
        monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
        words = "4 kB are to be downloaded, and 3 kB of disk are free in"
    else:
        free = Budget(500_000_000, "memory of this machine")
        monkeypatch.setattr("sfumato.engine.memory.device_memory.budget", lambda _: free)
        words = r"running it takes about 600 MB, and 500 MB are free \(memory of this machine\)"
    done = cli("pull", f"hf:{REPO}:Q4_K_M")
    assert done.code == 2
    assert re.search(words, done.err)
    assert f"`sfumato pull --force hf:{REPO}:Q4_K_M` does so all the same" in done.err
    assert hub_server.sent == []
    forced = cli("pull", "--force", f"hf:{REPO}:Q4_K_M")
    assert forced.code == 0
    assert re.search(f"warning: {words}", forced.err)


def test_the_memory_that_a_download_will_need() -> None:
    names = ["config.json", "model.safetensors"]
    listing = hub.Listing("a/b", REVISION, {"config.json": 1, "model.safetensors": 10**10})
    assert pull.memory(listing, names, None) == pytest.approx(10.6e9)
    assert pull.memory(listing, names, "q4_k") == pytest.approx(4.2e9)


def test_without_the_library_one_line_says_what_to_install(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for command in (["pull", f"hf:{REPO}"], ["run", "-m", f"hf:{REPO}", "Hi"]):
        done = cli(*command)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert "-m pip install huggingface_hub" in done.err


def test_the_published_ones_are_listed(cli: Any) -> None:
    """Without a name; the error of a path where nothing is, one line, says so."""
    done = cli("pull")
    assert (done.code, done.out) == (0, catalog.advice() + "\n")
    for command in (("run", "Hi", "-m"), ("inspect",), ("eval", "-m")):
        missed = cli(*command, "absent.gguf")
        assert (missed.code, missed.out, missed.err.count("\n")) == (2, "", 1)
        assert missed.err.startswith("sfumato: error: absent.gguf: does not exist; ")
        assert "`sfumato pull` lists models to download" in missed.err
