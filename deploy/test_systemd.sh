#!/bin/sh
# Boots systemd in a container of the image inferd:local (or IMAGE), and starts the service there: a chat, a killed
# engine, a server that stands still, a stop, a wrong setting. Needs root, buildah and systemd-nspawn, and the image in
# the storage of buildah and podman. Takes two minutes, one of them for the watchdog.
set -eu
cd "$(dirname "$0")/.."
image=${IMAGE:-inferd:local}
port=${PORT:-18766}
for name in buildah systemd-nspawn nsenter; do
    command -v $name >/dev/null || { echo "deploy/test_systemd.sh: install $name first" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "deploy/test_systemd.sh: only root can boot a container: run it as root" >&2; exit 1; }
work=$(mktemp -d)
container=

inside() { nsenter --target "$init" --all "$@"; }
show() { inside systemctl show inferd --property "$1" --value; }
fail() { echo "FAILED: $*" >&2; inside journalctl --unit inferd --no-pager --lines 20 >&2; exit 1; }
end() {
    [ -z "${boot:-}" ] || { kill -KILL "$boot" 2>/dev/null || true; wait "$boot" 2>/dev/null || true; }
    [ -z "$container" ] || buildah rm "$container" >/dev/null
    rm -rf "$work"
}
trap end EXIT
trap 'exit 1' INT TERM
# wait_for SECONDS COMMAND...
wait_for() {
    tries=$(($1 * 5)); shift
    until "$@" >/dev/null 2>&1; do tries=$((tries - 1)); [ $tries -gt 0 ] || return 1; sleep 0.2; done
}

echo "installing systemd into a container of $image"
container=$(buildah from --pull-never "$image")
root=$(buildah mount "$container")
buildah run --isolation chroot --user 0 "$container" sh -c \
    'apt-get update && apt-get install --yes --no-install-recommends systemd systemd-sysv dbus libnss-systemd procps' >"$work/log" 2>&1 \
    || { tail -5 "$work/log" >&2; exit 1; }
systemd-nspawn --quiet --boot --directory "$root" --register=no --keep-unit --console=pipe </dev/null >"$work/log" 2>&1 &
boot=$!
wait_for 30 pgrep -P "$boot" systemd || { cat "$work/log" >&2; echo "FAILED: no container was booted" >&2; exit 1; }
init=$(pgrep -P "$boot" systemd)
wait_for 30 inside systemctl is-system-running || true

key=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
settings=$root/etc/inferd/inferd.env
install -D -m 600 deploy/systemd/inferd.env "$settings"
sed -i "s/^INFERD_API_KEY=.*/INFERD_API_KEY=$key/; s/^INFERD_PORT=.*/INFERD_PORT=$port/" "$settings"
install -m 644 deploy/systemd/inferd.service "$root/etc/systemd/system/"
inside systemctl daemon-reload
inside systemctl start inferd || fail "systemctl start"
[ "$(show ActiveState)" = active ] || fail "the service is $(show ActiveState) after its start"
chat() {
    curl -sf -H "Authorization: Bearer $key" -H 'Content-Type: application/json' "http://127.0.0.1:$port/v1/chat/completions" \
        -d '{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}' | grep -q '"content"'
}
chat || fail "no answer to a chat as soon as systemctl start returned"
echo "started, and answered a chat at once"

server=$(show MainPID)
inside pkill -KILL -P "$server" || fail "the server has no engine"
wait_for 30 chat || fail "no answer after its engine was killed"
[ "$(show NRestarts)" = 0 ] || fail "systemd started it again although only its engine was killed"
echo "answered after its engine was killed"

inside kill -STOP "$server"
wait_for 90 sh -c "[ \$(nsenter --target $init --all systemctl show inferd --property NRestarts --value) = 1 ]" \
    || fail "no watchdog ended a server that stood still"
wait_for 30 chat || fail "no answer after the watchdog"
echo "started again by the watchdog after it stood still"

inside systemctl stop inferd
[ "$(show Result) $(show ExecMainStatus)" = "success 0" ] || fail "it stopped with $(show Result) $(show ExecMainStatus)"
echo "stopped with 0"

echo INFERD_MAX_NUM_SEQS=-3 >>"$settings"
inside systemctl start inferd 2>/dev/null && fail "it started with a wrong setting"
sleep 6
[ "$(show ExecMainStatus) $(show ActiveState)" = "2 failed" ] || fail "a wrong setting: $(show ExecMainStatus) $(show ActiveState), not 2 failed"
inside journalctl --unit inferd --no-pager | grep -q 'max_num_seqs must be' || fail "the log does not say which setting is wrong"
echo "refused a wrong setting, and was not started again"
echo "passed"
