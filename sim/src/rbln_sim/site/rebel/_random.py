# SPDX-License-Identifier: Apache-2.0
"""The simulated device's random generator (sampling only)."""

import torch

# Apart from torch's own: a graph that samples must not shift the host's numbers.
generator = torch.Generator(device="cpu")
generator.manual_seed(0)


def manual_seed(seed: int) -> None:
    """Seed the device's sampling, as ``rebel.manual_seed`` does.

    Args:
        seed: Any integer that ``torch.Generator.manual_seed`` takes.
    """
    generator.manual_seed(int(seed))
