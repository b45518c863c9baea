#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Can this host run the RBLN tests? Prints a verdict; see preflight.py.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install_checkout
say "preflight on $RUNTIME"
"$PYTHON" "$HERE/preflight.py" --runtime "$RUNTIME" --json "$ARTIFACTS/preflight.json"
