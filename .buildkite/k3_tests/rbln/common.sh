# SPDX-License-Identifier: Apache-2.0
# Sourced by the run-*.sh scripts.
#   RBLN_RUNTIME    auto (default), sim or npu: what to run on
#   RBLN_PYTHON     interpreter; .venv's by default, else python3
#   RBLN_ARTIFACTS  where logs and results go; build/buildkite by default
#   RBLN_INSTALL    1 installs this checkout before anything runs (default on
#                   Buildkite), 0 uses what is installed
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$HERE/../../.." && pwd)"
cd "$ROOT"

RUNTIME="${RBLN_RUNTIME:-auto}"
case "$RUNTIME" in
  auto | sim | npu) ;;
  *)
    echo "RBLN_RUNTIME must be auto, sim or npu, got '$RUNTIME'" >&2
    exit 2
    ;;
esac

if [[ -n "${RBLN_PYTHON:-}" ]]; then
  PYTHON="$RBLN_PYTHON"
elif [[ -x .venv/bin/python ]]; then
  PYTHON=.venv/bin/python
else
  PYTHON="$(command -v python3)"
fi

ARTIFACTS="${RBLN_ARTIFACTS:-$ROOT/build/buildkite}"
mkdir -p "$ARTIFACTS"

say() {
  echo "--- $*"
}

# Builds the wheel of this checkout and installs nothing else with it: the vendor's
# packages stay as they are.
install_checkout() {
  local default=0
  [[ -n "${BUILDKITE:-}" ]] && default=1
  if [[ "${RBLN_INSTALL:-$default}" != 1 ]]; then
    return
  fi
  say "install this checkout"
  BUILD_WITH_RBLN=1 "$PYTHON" -m pip install --no-build-isolation --no-deps \
    --force-reinstall . 2>&1 | tee "$ARTIFACTS/install.log"
}
