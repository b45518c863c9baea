# SPDX-License-Identifier: Apache-2.0
"""Storage plugins for LMCache on RBLN NPUs."""
