#!/bin/sh
# vLLM's router (pip install vllm-router) in front of two servers of one machine.
#
#   sh deploy/gateways/vllm-router.sh MODEL
#
# Clients use http://127.0.0.1:8080/v1. A SIGTERM to one server: it refuses what is new, the router
# sends that to the other one, and running requests end.
set -eu
model=${1:-}
started=
trap 'kill $started 2>/dev/null || true; wait' EXIT
trap exit INT TERM
for port in 8081 8082; do
    SFUMATO_MODEL=$model sfumato serve --name model --port "$port" --drain 60 &
    started="$started $!"
done
for port in 8081 8082; do
    until curl -fs "http://127.0.0.1:$port/readyz" >/dev/null; do sleep 1; done
done
# By the beginning of the prompt, and by load where one server has much more. A probe a second: one
# that fails takes a server out.
vllm-router --host 127.0.0.1 --port 8080 \
    --worker-urls http://127.0.0.1:8081 http://127.0.0.1:8082 \
    --policy cache_aware --request-id-headers x-request-id \
    --health-check-endpoint /readyz --health-check-interval-secs 1 --health-failure-threshold 1 \
    --prometheus-port 9090 &
started="$started $!"
wait # and not the router in the foreground: a shell takes its signals only between commands
