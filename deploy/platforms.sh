#!/bin/sh
# Read by the scripts beside it: the wheels that pip may take for a processor.

# pip_platforms MACHINE: pip's options of glibc from 2.17, the oldest that wheels name, to Debian 12's.
pip_platforms() {
    for glibc in $(seq 17 36); do printf -- '--platform manylinux_2_%s_%s ' "$glibc" "$1"; done
    printf -- '--platform manylinux2014_%s' "$1"
}
