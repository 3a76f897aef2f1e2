from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from sfumato.cli.terminal import speaks_unicode


@pytest.mark.parametrize(
    ("encoding", "expected"), [("ascii", b"a . 3x? - >"), ("latin-1", b"a . 3\xd7? \xb7 >")]
)
def test_what_cannot_be_encoded_becomes_something_readable(encoding: str, expected: bytes) -> None:
    code = "from sfumato.cli import main; main(['--version']); print('a … 3×漢 · ›')"
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60
    )
    assert done.stderr == b""
    assert done.stdout.splitlines()[1] == expected


def test_speaks_unicode() -> None:
    assert speaks_unicode(io.StringIO())
    assert speaks_unicode(io.TextIOWrapper(io.BytesIO(), "UTF-8"))
    assert speaks_unicode(io.TextIOWrapper(io.BytesIO(), "utf-16"))
    assert not speaks_unicode(io.TextIOWrapper(io.BytesIO(), "latin-1"))
