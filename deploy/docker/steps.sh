#!/bin/sh
# The steps of the image, one a call: the Dockerfile runs them, and so does try.sh without Docker.
#
#   torch DEVICE            Python, torch and a compiler; DEVICE is cpu or cuda
#   package SOURCE DEVICE   Sfumato beside them; SOURCE is checkout (build a wheel) or dist (take one)
#   runtime DEVICE          what the finished image needs of Debian, and its user
#   health                  does the server of this container take requests?
set -eu
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ROOT=/opt/sfumato
BUILD=/build
PIP="$ROOT/bin/python -m pip install --quiet --root-user-action ignore -c $BUILD/constraints.txt"

install() {
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends "$@" > /dev/null
    rm -rf /var/lib/apt/lists/*
}

case "$1" in
torch)
    install ca-certificates g++ python3-venv
    python3 -m venv "$ROOT"
    # PyPI's torch for Linux brings CUDA, some gigabytes; this index has the one without. What torch
    # needs comes from PyPI, in the versions of constraints.txt.
    [ "$2" = cuda ] || $PIP --no-deps --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch
    $PIP torch
    ;;
package)
    cd "$BUILD/checkout"
    wheels=dist
    if [ "$2" = checkout ]; then
        wheels="$BUILD/wheels"
        "$ROOT/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" .
    fi
    # By no index: a stranger may hold the name on one. pip picks the wheel of this platform.
    $PIP --no-deps --no-index --find-links "$wheels" sfumato
    if [ "$3" = cuda ]; then $PIP 'sfumato[hub,gpu]'; else $PIP 'sfumato[hub]'; fi
    # What no request needs: torch's tests, headers and programs but for the one that it looks for, and pip.
    torch=$("$ROOT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch
    rm -rf "$torch/test" "$torch/include"
    find "$torch/bin" -type f ! -name torch_shm_manager -delete
    "$ROOT/bin/python" -m pip uninstall --quiet --yes --root-user-action ignore pip
    "$ROOT/bin/python" -c 'from sfumato import ops; assert ops.backend.startswith("compiled"), ops.reason'
    ;;
runtime)
    # Triton compiles a few lines of C for each kernel that it launches.
    if [ "$2" = cuda ]; then set -- gcc libc6-dev python3-dev; else set --; fi
    install ca-certificates python3 "$@"
    useradd --uid 1000 --create-home sfumato
    mkdir /models
    chown sfumato:sfumato /models
    ;;
health)
    exec "$ROOT/bin/python" -c "import os, urllib.request
port = os.environ.get('SFUMATO_PORT') or 8080
urllib.request.urlopen(f'http://127.0.0.1:{port}/health', timeout=3)"
    ;;
*)
    echo "unknown step $1" >&2
    exit 2
    ;;
esac
