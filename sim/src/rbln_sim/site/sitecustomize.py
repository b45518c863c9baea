# SPDX-License-Identifier: Apache-2.0
"""Run by Python when it starts, in processes that use the simulated NPU.

Applies ``RBLN_SIM_WITHOUT``, then runs the ``sitecustomize`` that this one hides, if
there is one.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import rbln_sim_older

rbln_sim_older.install()


def _run_hidden() -> None:
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder).resolve() != here]
    spec = PathFinder.find_spec(__name__, others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


_run_hidden()
