#!/bin/sh
# Builds the image of this checkout with docker, podman or buildah, whichever of them works first.
#
#   deploy/build.sh    # for GPUs and CPUs
#   deploy/build.sh --build-arg TORCH_INDEX_URL=URL    # for CPUs alone: the index of PyTorch's CPU builds
#
# BUILDER names another program, and IMAGE another name for the image. Arguments go to the builder.
set -eu
cd "$(dirname "$0")/.."
image=${IMAGE:-inferd:local}
builder=${BUILDER:-}
if [ -z "$builder" ]; then
    for name in docker podman buildah; do
        # docker may be installed without a daemon that runs.
        if command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then builder=$name; break; fi
    done
fi
if [ -z "$builder" ]; then
    echo "deploy/build.sh: none of docker, podman and buildah works here: install one, or name another with BUILDER=..." >&2
    exit 1
fi
# The OCI format has no place for HEALTHCHECK. Without --layers, buildah would install the dependencies each time.
case ${builder##*/} in
    docker*) options= ;;
    podman) options="--format docker" ;;
    *) options="--format docker --layers" ;;
esac
revision=$(git describe --always --dirty 2>/dev/null || echo unknown)
echo "building $image with $builder, revision $revision"
exec "$builder" build $options --build-arg "REVISION=$revision" --tag "$image" --file Dockerfile "$@" .
