#!/bin/sh
# The wheels for other processors and systems, run on this Linux machine (x86_64) by emulators.
#
#     deploy/try_elsewhere.sh aarch64     the fuzz program of the tests on the wheel's library, by qemu-aarch64
#     deploy/try_elsewhere.sh windows     the same by Wine
#     deploy/try_elsewhere.sh answer      one short answer on aarch64: Debian's Python, torch's wheel, the wheel
#
# Needs `make wheels`, qemu-user, wine64, and debootstrap (as root) for a root of arm64 in $ROOT. The library
# has no threads but in `answer`.
set -eu
cd "$(dirname "$0")/.."
release=${RELEASE:-bookworm}
root=${ROOT:-${TMPDIR:-/tmp}/sfumato-$release-arm64}
python=$PWD/.venv-wheels/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fuzz() { # PLATFORM TARGET LIBRARY FLAG…: the program beside the library of the platform's wheel
    "$python" -m zipfile -e dist/*-py3-none-"$1".whl "$work/wheel"
    cp "$work/wheel/sfumato/ops/cpu/$3" "$work"
    target=$2 library=$3 && shift 3
    "$python" -m ziglang c++ -target "$target" -std=gnu++17 -O3 -g0 -s -w -DSF_FUZZ_SERIAL -Isrc/sfumato/ops/cpu/csrc \
        tests/ops/cpu/csrc/fuzz.cpp "$@" -o "$work/fuzz.exe"
    echo "$library of $target: $(wc -c < "$work/$library") bytes"
}

arm() { # of Debian's packages, unpacked and not configured: qemu-aarch64 finds its libraries there
    [ -e "$root/usr/bin/python3" ] && return
    debootstrap --foreign --arch arm64 --variant=minbase --include=python3 "$release" "$root" > "$root.log"
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
}

case "$1" in
aarch64)
    arm
    fuzz manylinux_2_28_aarch64 aarch64-linux-gnu.2.28 _kernels.so "$work/_kernels.so" "-Wl,-rpath,$work"
    for processor in cortex-a72 cortex-a76 max; do
        qemu-aarch64 -L "$root" -cpu "$processor" "$work/fuzz.exe" "${SEED:-1}"
    done
    ;;
windows)
    { echo EXPORTS && grep -o '\bsf_[a-z0-9_]*(' src/sfumato/ops/cpu/csrc/sfumato.h | tr -d '(' | sort -u; } > "$work/_kernels.def"
    "$python" -m ziglang dlltool -m i386:x86-64 -D _kernels.dll -d "$work/_kernels.def" -l "$work/_kernels.lib"
    fuzz win_amd64 x86_64-windows-gnu _kernels.dll "$work/_kernels.lib"
    WINEPREFIX=$work/wine WINEDEBUG=-all "$(command -v wine64 || echo /usr/lib/wine/wine64)" "$work/fuzz.exe" "${SEED:-1}"
    ;;
answer)
    arm
    version=$(basename "$(readlink "$root/usr/bin/python3")")
    . deploy/platforms.sh
    # PyPI's torch for Linux on aarch64 brings CUDA too, 2.8 GB; TORCH_INDEX may have one without.
    # shellcheck disable=SC2046
    "$python" -m pip install -q ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt --target "$root/packages" --upgrade \
        --only-binary :all: --python-version "${version#python}" $(pip_platforms aarch64) dist/*_aarch64.whl
    # What torch reads of the processor as it is loaded, and the host does not say: a Neoverse N1.
    mkdir -p "$root/proc" "$root/sys/devices/system/cpu/cpu0/regs/identification"
    echo 0x00000000413fd0c1 > "$root/sys/devices/system/cpu/cpu0/regs/identification/midr_el1"
    printf 'processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n' > "$root/proc/cpuinfo"
    run() {
        PYTHONPATH=$root/packages timeout "${LIMIT:-1500}" qemu-aarch64 -L "$root" -cpu neoverse-n1 "$root/usr/bin/python3" "$@"
    }
    start=$(date +%s)
    run -c 'from sfumato.cli import main; raise SystemExit(main())' run --no-visual "What is the capital of France?"
    echo "answered in $(($(date +%s) - start)) s"
    run -c 'from sfumato import ops; print(ops.backend); assert ops.backend.startswith("compiled")'
    ;;
esac
