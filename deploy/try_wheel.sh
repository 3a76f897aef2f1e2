#!/bin/sh
# The wheel of this machine in a bare Debian without a compiler: `pip install`, then `sfumato demo`.
#
#     make test-wheel [RELEASE=bookworm]
#
# Needs to be root, debootstrap, and a wheel in dist/ (make wheels). What pip installs is downloaded
# first, torch's build for CPUs where pip finds it; in the root pip has no index.
set -eu
cd "$(dirname "$0")/.."
release=${RELEASE:-bookworm}
root=${ROOT:-${TMPDIR:-/tmp}/sfumato-$release}
wheel=$(ls dist/*-manylinux_*_"$(uname -m)".whl)

[ -e "$root/usr/bin/python3" ] || debootstrap --variant=minbase --include=python3,python3-venv \
    "$release" "$root" > "$root.log"
! chroot "$root" sh -c 'command -v cc c++ gcc g++ clang' || { echo "it has a compiler" >&2; exit 1; }
version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p "$root/wheels"
. deploy/platforms.sh
# shellcheck disable=SC2046
"${PYTHON:-python3}" -m pip download -q --dest "$root/wheels" -c constraints.txt \
    --find-links "$root/wheels" --only-binary :all: --python-version "$version" $(pip_platforms "$(uname -m)") "$wheel"
chroot "$root" python3 -m venv --clear /venv
mount -t proc proc "$root/proc"
trap 'umount "$root/proc"' EXIT
start=$(date +%s)
chroot "$root" /venv/bin/pip install -q --no-index --find-links /wheels sfumato
chroot "$root" /venv/bin/sfumato demo --no-visual
echo "$release: installed and shown in $(($(date +%s) - start)) s"
chroot "$root" /venv/bin/python -c \
    'from sfumato import ops; print(ops.backend); assert ops.backend.startswith("compiled")'
