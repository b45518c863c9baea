# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend and what surrounds it."""
