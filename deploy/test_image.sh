#!/bin/sh
# Runs the image inferd:local (or IMAGE) as a user that nobody knows, on a read-only root without capabilities: READY,
# 401 without a key, a chat, the health command, SIGTERM, exit 0. Uses docker or podman; else buildah and chroot, as root.
set -eu
image=${IMAGE:-inferd:local}
key=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
port=${PORT:-18765}
url=http://127.0.0.1:$port
work=$(mktemp -d)
engine=
for name in docker podman buildah; do
    if command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then engine=$name; break; fi
done
[ -n "$engine" ] || { echo "deploy/test_image.sh: none of docker, podman and buildah works here: install one" >&2; exit 1; }

fail() { echo "FAILED: $*" >&2; tail -20 "$work/log" >&2; exit 1; }

# run ENV... -- COMMAND...: the command in a new container, as its process 1.
run() {
    flags= variables=
    while [ "$1" != -- ]; do flags="$flags --env $1" variables="$variables $1"; shift; done
    shift
    if [ "$engine" = buildah ]; then
        exec unshare --mount --pid --fork --kill-child sh -euc '
            root=$1; shift
            mount --bind "$root" "$root" && mount -o remount,bind,ro "$root"
            mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev"
            mount -t tmpfs -o mode=1777 tmpfs "$root/tmp" && mount -t tmpfs -o mode=0777 tmpfs "$root/cache"
            exec setpriv --no-new-privs --bounding-set=-all,+setuid,+setgid,+sys_chroot chroot --userspec=12345:12345 --groups= "$root" "$@"
        ' sh "$root" env -i $config $variables "$@"
    fi
    exec "$engine" run --rm --init=false --name inferd-test --read-only --user 12345:12345 --cap-drop ALL \
        --security-opt no-new-privileges --tmpfs /tmp:mode=1777 --tmpfs /cache:mode=0777 --publish "127.0.0.1:$port:$port" \
        $flags --entrypoint "$1" "$image" $(shift; echo "$@")
}

end() {
    [ -z "${server:-}" ] || kill -KILL "$server" 2>/dev/null || true
    if [ "$engine" = buildah ]; then buildah rm "$container" >/dev/null; else "$engine" rm -f inferd-test >/dev/null 2>&1 || true; fi
    rm -rf "$work"
}

if [ "$engine" = buildah ]; then
    container=$(buildah from --pull-never "$image")
    root=$(buildah mount "$container")
    config=$(buildah inspect --format '{{range .OCIv1.Config.Env}}{{.}} {{end}}' "$container")
fi
trap end EXIT
trap 'exit 1' INT TERM

code=0
(run INFERD_PORT=$port -- inferd serve) >"$work/log" 2>&1 || code=$?
[ "$code" = 2 ] || fail "a start without a key ended with $code, not 2"
echo "refused without a key"

(run INFERD_PORT=$port INFERD_API_KEY=$key -- inferd serve) >"$work/log" 2>&1 &
server=$!
tries=0
until grep -q '^READY' "$work/log"; do
    tries=$((tries + 1))
    [ $tries -lt 240 ] && kill -0 $server 2>/dev/null || fail "not READY"
    sleep 0.5
done
grep '^READY' "$work/log"
grep -q 'kernels .*C++ for' "$work/log" || fail "the C++ kernels are not used"
body='{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
status=$(curl -s -o /dev/null -w '%{http_code}' -d "$body" -H 'Content-Type: application/json' $url/v1/chat/completions)
[ "$status" = 401 ] || fail "a chat without the key got $status, not 401"
curl -sf -d "$body" -H 'Content-Type: application/json' -H "Authorization: Bearer $key" $url/v1/chat/completions | grep -q '"content"' \
    || fail "no answer to a chat"
echo "answered a chat, and refused one without the key"
health="import os, urllib.request; urllib.request.urlopen('$url/health', timeout=4)"
if [ "$engine" = buildah ]; then chroot "$root" /opt/inferd/bin/python -c "$health"; else "$engine" exec inferd-test python -c "$health"; fi \
    || fail "the health command failed"
echo "healthy"
if [ "$engine" = buildah ]; then kill -TERM "$(pgrep -P "$server" | head -1)"; else "$engine" kill --signal TERM inferd-test >/dev/null; fi
code=0
wait $server || code=$?
server=
[ "$code" = 0 ] || fail "SIGTERM ended with $code, not 0"
echo "ended at SIGTERM with 0"
if grep -i 'read-only file system\|permission denied' "$work/log"; then fail "it tried to write outside /cache and /tmp"; fi
echo "passed"
