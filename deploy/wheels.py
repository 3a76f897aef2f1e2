"""Builds the wheels of all platforms on one Linux machine, by Zig's cross-compiler; checks them.

    make wheels [ONLY="win_amd64 macosx_14_0_arm64"]

A wheel serves every Python of its platform: py3-none-PLATFORM. The library in it is linked to the
C library of its system alone, C++'s is within, and OpenMP is torch's, looked up at run time. Each
wheel must have its library, the embedded model, the licence and a bill of materials, and be small
enough; `auditwheel` holds Linux' symbols to the platform's name. Wheels go to dist/.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 20_000_000  # bytes of a wheel

PLATFORMS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_14_0_arm64": "aarch64-macos.14.0",
    "win_amd64": "x86_64-windows-gnu",
}
"""The names of wheels, and Zig's of the same platforms. Torch has no wheels for macOS on x86_64,
and none for Windows on ARM."""

MODELS = [f"sfumato/{name}/model.safetensors" for name in ("embedded", "embedded_masks")]
MAGIC = {"many": b"\x7fELF", "maco": b"\xcf\xfa\xed\xfe", "win_": b"MZ"}
"""How a library of a platform begins."""


def build(platform: str, dist: Path) -> Path:
    compiler = f"{shlex.quote(sys.executable)} -m ziglang c++ -target {PLATFORMS[platform]}"
    # Zig adds checks of undefined behaviour to C, which cost time and no library has.
    flags = {"CFLAGS": "-fno-sanitize=undefined", "LDFLAGS": "-s"}
    link = dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{compiler} -shared")
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", f"build/{platform}"]
    command += ["bdist_wheel", "--plat-name", platform, "--dist-dir", str(dist)]
    environment = os.environ | {"CC": compiler, "CXX": compiler} | link | flags
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (wheel,) = dist.glob(f"*-py3-none-{platform}.whl")
    return wheel


def check(wheel: Path, platform: str) -> str:
    """A line about a wheel; raises SystemExit for one that must not be published."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (library,) = [name for name in names if re.search(r"cpu/_kernels\.(so|dll)$", name)]
        code = archive.read(library)
        (sbom,) = [name for name in names if name.endswith(".dist-info/sboms/sfumato.cdx.json")]
        faults = [
            "the library is of another platform" * (not code.startswith(MAGIC[platform[:4]])),
            "the library names an OpenMP runtime" * bool(re.search(rb"lib(g|i)?omp", code)),
            "a packaged model is missing" * (not set(MODELS) <= set(names)),
            "no licence" * (not any(name.endswith("/licenses/LICENSE") for name in names)),
            "no bill of materials" * (json.loads(archive.read(sbom))["components"] == []),
            f"more than {LIMIT} bytes" * (wheel.stat().st_size > LIMIT),
        ]
    if platform.startswith("many"):
        shown = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True
        )
        said = " ".join(shown.stdout.split())
        found = re.search(r'platform tag: "manylinux_2_(\d+)_', said)
        if not found or int(found[1]) > 28:
            faults.append(f"auditwheel: {said or shown.stderr}")
    if any(faults):
        raise SystemExit(f"{wheel.name}: {'; '.join(filter(None, faults))}")
    return f"{wheel.name}: {wheel.stat().st_size:,} bytes, the library {len(code):,}"


def main() -> None:
    dist = ROOT / "dist"
    for platform in sys.argv[1:] or PLATFORMS:
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools takes what lies there
        for older in dist.glob(f"*-{platform}.whl"):
            older.unlink()
        print(check(build(platform, dist), platform), flush=True)


if __name__ == "__main__":
    main()
