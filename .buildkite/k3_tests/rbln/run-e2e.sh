#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves a model with lmcache server and vLLM-RBLN, cold and warm.
#   run-e2e.sh              the demo, then all end-to-end tests
#   run-e2e.sh demo         only the demo; further arguments go to it
#   run-e2e.sh tests        only the tests; further arguments go to pytest
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PART="${1:-all}"
[[ $# -gt 0 ]] && shift

run_demo() {
  say "lmcache server and vllm serve on $RUNTIME"
  "$PYTHON" -m examples.rbln_demo --runtime "$RUNTIME" \
    --folder "$ARTIFACTS/demo" "$@"
}

run_tests() {
  say "end-to-end tests on $RUNTIME"
  "$PYTHON" -m pytest -q -rs --runtime "$RUNTIME" \
    --junitxml "$ARTIFACTS/e2e-tests.xml" tests/e2e "$@"
  "$PYTHON" "$HERE/check_results.py" "$ARTIFACTS/e2e-tests.xml"
}

case "$PART" in
  all)
    install_checkout
    run_demo
    run_tests
    ;;
  demo)
    install_checkout
    run_demo "$@"
    ;;
  tests)
    install_checkout
    run_tests "$@"
    ;;
  *)
    echo "usage: run-e2e.sh [all | demo ... | tests ...], got '$PART'" >&2
    exit 2
    ;;
esac
