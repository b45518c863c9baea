#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of the device backend. Arguments go to pytest. Fails if a test that
# needs an NPU was skipped: a skipped case validates nothing.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install_checkout
say "device tests on $RUNTIME"
"$PYTHON" -m pytest -q -rs --runtime "$RUNTIME" \
  --junitxml "$ARTIFACTS/device-tests.xml" \
  tests/v1/platform/devices/rbln "$@"
"$PYTHON" "$HERE/check_results.py" "$ARTIFACTS/device-tests.xml"
