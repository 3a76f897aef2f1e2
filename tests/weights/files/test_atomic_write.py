from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from sfumato.convert.files import check_checkpoint_folder
from sfumato.weights.files.atomic_write import atomic_path, check_writable, create_file


def _names(folder: Path) -> set[str]:
    return {item.name for item in folder.iterdir()}


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "x.gguf", 5) as part:
        part.write_bytes(b"whole")
        assert not (tmp_path / "x.gguf").exists()
    assert (tmp_path / "x.gguf").read_bytes() == b"whole"
    assert _names(tmp_path) == {"x.gguf"}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_nothing_stays_of_what_fails(tmp_path: Path, error: BaseException, folder: bool) -> None:
    with pytest.raises(type(error)) as raised, atomic_path(tmp_path / "x", 5) as part:
        if folder:
            part.mkdir()
            (part / "half").touch()
        else:
            part.write_bytes(b"half")
        raise error
    assert _names(tmp_path) == set()
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(tmp_path / "x")


def test_what_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"x\.gguf: exists already.*--force"), atomic_path(path, 1):
        raise AssertionError
    with pytest.raises(RuntimeError), atomic_path(path, 1, force=True) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    with atomic_path(path, 1, force=True) as part:
        part.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert _names(tmp_path) == {"x.gguf"}


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(ValueError, match="exists already"), atomic_path(path, 1) as part:
        part.write_bytes(b"ours")
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert _names(tmp_path) == {"x.gguf"}


OURS = json.dumps({"model_type": "diffusion_gemma"})


def _folder(path: Path, config: str = OURS) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    return path


def _replace(path: Path) -> None:
    with atomic_path(path, 1, True, check_checkpoint_folder) as part:
        part.mkdir()
        (part / "config.json").write_text("{1}")


def test_a_checkpoint_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = _folder(tmp_path / "model")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
                 "chat_template.jinja", "model.safetensors", "model.safetensors.index.json",
                 "model-00001-of-00002.safetensors"):  # fmt: skip
        (path / name).touch()
    _replace(path)
    assert _names(path) == {"config.json"}
    assert (path / "config.json").read_text() == "{1}"
    assert _names(tmp_path) == {"model"}


@pytest.mark.parametrize("other", ["thesis.txt", "package.json", "other.safetensors", ".git/"])
def test_a_folder_with_anything_else_is_never_replaced(tmp_path: Path, other: str) -> None:
    path = _folder(tmp_path / "web")
    (path / other).mkdir() if other.endswith("/") else (path / other).touch()
    with pytest.raises(ValueError, match=f"web: holds '{other.strip('/')}', which is no part"):
        _replace(path)
    assert _names(path) == {"config.json", other.strip("/")}


@pytest.mark.parametrize("config", ["{}", '{"model_type": "llama"}', "{"])
def test_nor_is_one_of_another_program(tmp_path: Path, config: str) -> None:
    path = _folder(tmp_path / "home", config)
    with pytest.raises(ValueError, match="home: is a folder, and no checkpoint"):
        _replace(path)
    assert _names(path) == {"config.json"}


def test_an_empty_folder_has_nothing_to_lose(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with atomic_path(tmp_path / "new", 1) as part:
        part.mkdir()
        (part / "config.json").touch()
    assert _names(tmp_path) == {"new"} and _names(tmp_path / "new") == {"config.json"}


def test_what_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, access = tmp_path / "x", os.access
    path.touch()
    for refused, message in ((path, "is read-only"), (tmp_path, "cannot be written")):
        with monkeypatch.context() as patched:  # root may write everywhere
            patched.setattr(
                os, "access", lambda it, mode, no=refused: it != no and access(it, mode)
            )
            with pytest.raises(ValueError, match=message):
                check_writable(path, force=True)


def test_a_file_is_created_with_its_permissions_and_over_no_link(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.touch()
    like.chmod(0o640)
    create_file(tmp_path / "a", b"a", like.stat())
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            create_file(tmp_path / name, b"b")
    assert _names(tmp_path) == {"like", "a", "link"}


def test_what_a_link_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    folder = _folder(tmp_path / "disk" / "model")
    (tmp_path / "disk" / "x.gguf").write_bytes(b"old")
    for name in ("model", "x.gguf"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    _replace(tmp_path / "model")
    with atomic_path(tmp_path / "x.gguf", 1, force=True) as part:
        part.write_bytes(b"new")
    assert (folder / "config.json").read_text() == "{1}"
    assert (tmp_path / "disk" / "x.gguf").read_bytes() == b"new"
    assert (tmp_path / "model").is_symlink() and (tmp_path / "x.gguf").is_symlink()
    assert _names(tmp_path) == {"disk", "model", "x.gguf"}
    assert _names(tmp_path / "disk") == {"model", "x.gguf"}


def test_a_link_inside_a_folder_is_not_taken_for_its_file(tmp_path: Path) -> None:
    path = _folder(tmp_path / "model")
    (path / "tokenizer.json").symlink_to(path / "config.json")
    with pytest.raises(ValueError, match=r"holds 'tokenizer\.json'"):
        _replace(path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match=r"x\.gguf: is neither a file nor a folder"):
        atomic_path(tmp_path / "x.gguf", 1, force=True).__enter__()
    assert (tmp_path / "x.gguf").is_fifo()


@pytest.mark.parametrize(
    ("error", "failing", "done", "content"),
    [
        (OSError, "model", False, OURS),
        (OSError, ".part", False, OURS),
        (KeyboardInterrupt, "model", False, OURS),
        (KeyboardInterrupt, "model", True, OURS),
        (KeyboardInterrupt, ".part", False, OURS),
        (KeyboardInterrupt, ".part", True, "{1}"),
    ],
)
def test_a_folder_is_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException], failing: str, done: bool, content: str,
) -> None:  # fmt: skip
    """Whether a rename fails, or a signal comes before or right after it."""
    path, rename = _folder(tmp_path / "model"), Path.rename

    def fails(source: Path, target: Path) -> Path:
        fails_now = source.name.endswith(failing)
        if done or not fails_now:
            rename(source, target)
        if fails_now:
            raise error
        return target

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(error):
        _replace(path)
    assert (path / "config.json").read_text() == content
    assert _names(tmp_path) == {"model"}


def test_an_old_folder_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _folder(tmp_path / "model")

    def fails(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "rmdir", fails)
    _replace(path)
    assert (path / "config.json").read_text() == "{1}"


def test_too_little_room_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes 1,000,000,000,000\.0 MB.*free"):
        atomic_path(tmp_path / "x", 10**18).__enter__()
    assert _names(tmp_path) == set()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .*nowhere does not exist"):
        atomic_path(tmp_path / "nowhere" / "x", 1).__enter__()


def test_a_folder_is_kept_that_no_function_checks(tmp_path: Path) -> None:
    path = _folder(tmp_path / "model")
    with pytest.raises(ValueError, match="model: is a folder; name a file"):
        atomic_path(path, 1, force=True).__enter__()
