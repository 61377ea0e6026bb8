#!/bin/sh
# Starts the server and Prometheus as deploy/compose.yaml says, with the image inferd:local: healthy, a chat, a scrape, a
# stop with 0. Needs docker with compose. It removes its containers and volumes.
set -eu
cd "$(dirname "$0")/.."
INFERD_API_KEY=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
PORT=${PORT:-18767}
export INFERD_API_KEY PORT GRAFANA_PASSWORD=unused
if docker compose version >/dev/null 2>&1; then compose='docker compose'; else compose=docker-compose; fi
compose="$compose --file deploy/compose.yaml --project-name inferd-test"

fail() { echo "FAILED: $*" >&2; $compose logs --tail 20 >&2; exit 1; }
# wait_for SECONDS COMMAND...
wait_for() {
    tries=$1; shift
    until "$@" >/dev/null 2>&1; do tries=$((tries - 1)); [ $tries -gt 0 ] || return 1; sleep 1; done
}
state() { docker inspect --format "{{.State.$1}}" "$server"; }
is_healthy() { [ "$(state Health.Status)" = healthy ]; }
is_scraped() { curl -sf 'http://127.0.0.1:9090/api/v1/query?query=up' | grep -q '"1"\]'; }
trap '$compose down --volumes >/dev/null 2>&1' EXIT
trap 'exit 1' INT TERM

$compose up --detach --no-build inferd prometheus || fail "compose up"
server=$($compose ps --quiet inferd)
wait_for 120 is_healthy || fail "the server is $(state Health.Status), not healthy"
echo "healthy"
curl -sf -H "Authorization: Bearer $INFERD_API_KEY" -H 'Content-Type: application/json' "http://127.0.0.1:$PORT/v1/chat/completions" \
    -d '{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}' | grep -q '"content"' \
    || fail "no answer to a chat"
echo "answered a chat"
wait_for 60 is_scraped || fail "Prometheus cannot scrape the server"
echo "scraped by Prometheus"
$compose stop inferd || fail "compose stop"
[ "$(state ExitCode)" = 0 ] || fail "the server ended with $(state ExitCode), not 0"
echo "stopped with 0"
echo "passed"
