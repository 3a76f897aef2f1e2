#!/bin/bash
# The image without Docker: its steps in bare roots of debootstrap, and the server as the image
# starts it: as its user, with a root that is read-only. Prints sizes and times. As root:
#
#   deploy/docker/try.sh [cpu|cuda] [RELEASE] [checkout|dist]
#
# PIP_* and TORCH_INDEX in the environment name other places for packages; $KEEP is kept as a folder
# of roots, so that a second run starts from its Debian.
set -euo pipefail
device=${1:-cpu} release=${2:-trixie} source=${3:-checkout} port=${SFUMATO_PORT:-18080}
here=$(cd "$(dirname "$0")" && pwd) checkout=$(cd "$(dirname "$0")/../.." && pwd)
roots=${KEEP:-$(mktemp -d)} base=$roots/$release
build=$roots/build-$device image=$roots/image-$device
[ -n "${KEEP:-}" ] || trap 'rm -rf "$roots"' EXIT

inside() { # ROOT COMMAND…: in place of this shell, in a mount namespace of its own, so that nothing stays mounted
    # shellcheck disable=SC2016  # the inner shell expands
    exec unshare --mount --propagation private bash -euc '
        root=$1; shift
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev"
        for folder in ${PIP_FIND_LINKS:-}; do
            mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder"
        done
        [ -z "${READ_ONLY:-}" ] || { mount -o remount,bind,ro "$root"
            mount -t tmpfs tmpfs "$root/tmp" && mount --bind "$READ_ONLY" "$root/models"; }
        exec chroot ${READ_ONLY:+--userspec=1000:1000} "$root" "$@"' - "$@"
}

step() { # ROOT STEP ARGUMENT…
    local root=$1 from=$SECONDS
    shift
    (inside "$root" sh /usr/local/lib/sfumato/steps.sh "$@")
    echo "$*: $((SECONDS - from)) s"
}

[ -d "$base" ] || debootstrap --variant=minbase "$release" "$base" > /dev/null
rm -rf "$build" "$image"
for root in "$build" "$image"; do
    cp -a "$base" "$root"
    cp -L /etc/resolv.conf "$root/etc/"
    install -D "$here/steps.sh" "$root/usr/local/lib/sfumato/steps.sh"
    [ -z "${SSL_CERT_FILE:-}" ] || cp "$SSL_CERT_FILE" "$root/usr/local/lib/sfumato/"
done
if [ -n "${SSL_CERT_FILE:-}" ]; then # a proxy's certificates
    SSL_CERT_FILE=/usr/local/lib/sfumato/$(basename "$SSL_CERT_FILE")
    export SSL_CERT_FILE REQUESTS_CA_BUNDLE=$SSL_CERT_FILE PIP_CERT=$SSL_CERT_FILE
fi

dist=() && [ "$source" = checkout ] || dist=(dist)
mkdir -p "$build/build/checkout"
cp "$checkout/constraints.txt" "$build/build/"
step "$build" torch "$device"
# As the Dockerfile copies it: what Dockerfile.dockerignore lets through.
(cd "$checkout" && tar c --exclude=__pycache__ --exclude='*.so' --exclude='*.egg-info' \
    LICENSE README.md constraints.txt pyproject.toml setup.py src "${dist[@]}") |
    tar x -C "$build/build/checkout"
step "$build" package "$source" "$device"
step "$image" runtime "$device"
cp -a "$build/opt/sfumato" "$image/opt/"
echo "image: $(du -sm "$image" | cut -f 1) MB, of which Debian $(du -sm "$base" | cut -f 1)"

export PATH=/opt/sfumato/bin:$PATH HF_HOME=/models/huggingface SFUMATO_PORT=$port SFUMATO_HOST=127.0.0.1
export SFUMATO_API_KEY=tried READ_ONLY=$roots/models HOME=/home/sfumato
install -d -o 1000 -g 1000 "$READ_ONLY"
inside "$image" sfumato serve &
server=$! from=$SECONDS
for _ in $(seq 60); do
    (inside "$image" sh /usr/local/lib/sfumato/steps.sh health) 2> /dev/null && break
    kill -0 $server && sleep 1
done
(inside "$image" sh /usr/local/lib/sfumato/steps.sh health)
echo "healthy $((SECONDS - from)) s after its start, as user $(awk '/^Uid/ { print $2 }' /proc/$server/status)"
(inside "$image" python3 -c "import json, os, urllib.request
body = json.dumps({'messages': [{'role': 'user', 'content': 'What is the capital of France?'}]}).encode()
request = urllib.request.Request(f'http://127.0.0.1:{os.environ[\"SFUMATO_PORT\"]}/v1/chat/completions', body,
    {'Content-Type': 'application/json', 'Authorization': 'Bearer tried'})
print(json.load(urllib.request.urlopen(request))['choices'][0]['message']['content'])")
kill $server
wait $server
