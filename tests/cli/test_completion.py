from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ASK = """
ask() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  "$(complete -p sfumato | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
  echo "${COMPREPLY[*]}"
}
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_what_it_has_sourced(cli: Any, tmp_path: Path) -> None:
    script = tmp_path / "sfumato.bash"
    script.write_text(cli("completion", "bash").out)
    (tmp_path / "model.gguf").touch()
    questions = {
        ("se",): "serve",
        ("serve", "--por"): "--port",
        ("serve", "--no-"): "",  # what turns flags off is not listed
        ("run", "--activations", ""): "int8 bf16",
        ("completion", ""): "bash zsh fish",
        ("inspect", f"{tmp_path}/mod"): f"{tmp_path}/model.gguf",
        ("serve", "-m", f"{tmp_path}/mod"): f"{tmp_path}/model.gguf",
    }
    calls = "".join(f"ask sfumato {' '.join(map(repr, words))}\n" for words in questions)
    command = ["bash", "--norc", "-c", f"source '{script}'\n{ASK}{calls}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == list(questions.values())


@pytest.mark.parametrize(
    ("shell", "sign"), [("zsh", "#compdef sfumato"), ("fish", "complete -c sfumato")]
)
def test_other_shells(cli: Any, shell: str, sign: str) -> None:
    done = cli("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert sign in done.out and "max-tokens" in done.out


def test_an_unknown_shell_is_refused(cli: Any) -> None:
    assert "invalid choice: 'tcsh'" in cli("completion", "tcsh").err
