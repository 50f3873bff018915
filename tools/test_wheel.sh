#!/usr/bin/env bash
# Installs a wheel where there is nothing but Python, no compiler, no CUDA toolkit and no sources, and tests it there.
#
#   tools/test_wheel.sh WHEEL cuda|cpu|none [PYTHON]
#
# PIP_ variables are pip's, as PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER without a network. JAXNORM_TEST_EXTRAS=test,cuda13
# installs JAX's CUDA packages too, so that on a GPU its kernels are tested; JAXNORM_TEST_EXTRAS=none installs nothing
# but the wheel, beside what PYTHON can import.
set -euo pipefail

(($# >= 2)) || { sed -n 's/^#   //p' "$0" >&2; exit 2; }
wheel=$(realpath "$1") kind=$2 python=$(command -v "${3:-python3}")
root=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The environment has the programs of its own and no others, and no variable of this one but pip's.
passed=()
for name in "${!PIP_@}"; do passed+=("$name=${!name}"); done
bare() { env -i HOME="$work" TMPDIR="$work" LANG=C.UTF-8 PATH="$work/venv/bin" "${passed[@]}" "$@"; }

"$python" -m venv "$work/venv"
for program in nvcc cc gcc c++ g++ clang; do
  ! bare "$work/venv/bin/python" -c "import shutil, sys; sys.exit(shutil.which('$program') is None)" ||
    { echo "test_wheel: $program is there" >&2; exit 1; }
done
extras=${JAXNORM_TEST_EXTRAS:-test}
if [[ $extras == none ]]; then
  "$python" -P -c 'import sys; print(*filter(None, sys.path), sep="\n")' >"$(echo "$work"/venv/lib/*/site-packages)/others.pth"
  bare pip install --quiet --no-deps --no-index "$wheel"
else
  bare pip install --quiet "$wheel[$extras]"
fi

mkdir "$work/suite"
cp -r "$root/pyproject.toml" "$root/LICENSE" "$root/bench" "$root/tests" "$work/suite"
cd "$work/suite"
bare python -m jaxnorm.info --op layer_norm --dtype bfloat16 --platform "${kind/none/cpu}"
bare python - "$kind" <<'END'
import sys

import jaxnorm
from jaxnorm import info

native = info.native_modules()
print(f"jaxnorm {jaxnorm.__version__}, {native}")
assert native["cpu"]["loaded"] == (sys.argv[1] != "none"), native
assert native["cuda"]["loaded"] == (sys.argv[1] == "cuda"), native
END
if [[ $kind == none ]]; then
  # A case of each test of the layers, and of the laws that XLA's code keeps.
  tests=(-n 2 tests/integrations tests/laws/test_{accuracy,axis_name,extremes,jet,refused_arguments,transformations}.py)
else
  # That kernels load and run, both ways; that plans, which need no GPU, are those of the package; some laws.
  tests=(--full tests/native/test_modules.py tests/test_plan.py tests/laws/test_{accuracy,bits}.py)
fi
bare python -m pytest -p no:cacheprovider -q "${tests[@]}"
