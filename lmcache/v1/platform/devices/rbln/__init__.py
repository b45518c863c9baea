# SPDX-License-Identifier: Apache-2.0
"""Rebellions (RBLN) NPUs: detection and capabilities.

torch-rbln adds ``torch.rbln`` when torch is imported. Nothing here opens an NPU:
an NPU that another process holds still counts as one, and the reason it can't be
used comes with the worker's first use of it.

The backend serves *engine-driven* multiprocess transfers only: torch-rbln can share
neither events nor tensors with another process, which LMCache-driven ones need.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
import importlib.util
import os

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.devices._rbln_runtime import (
    BACKEND_ENV_VAR,
    is_pinned,
    missing_runtime,
)

if TYPE_CHECKING:
    # First Party
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo
    from lmcache.v1.multiprocess.transfer_context.async_engine_driven import (
        AsyncEngineDrivenTransferContext,
    )
    from lmcache.v1.platform.base.device_ops import DeviceOps

logger = init_logger(__name__)


class RblnDeviceSpec(DeviceSpec):
    """Rebellions NPUs through ``torch.rbln``."""

    _warned = False

    def __init__(self) -> None:
        """Describe RBLN.

        Raises:
            RuntimeError: If torch is not the one that LMCache was built for, or can't
                be imported because torch-rbln lacks its runtime. LMCache's scan for
                devices hides the first failure, and later ones no longer tell the
                reason.
        """
        # First Party
        from lmcache.v1.platform.devices.rbln.torch_build import require_built_torch

        require_built_torch()
        try:
            # Third Party
            import torch  # noqa: F401
        except ModuleNotFoundError:
            # LMCache's CLI works without torch.
            pass
        except Exception as exc:
            raise RuntimeError(
                f"torch can't be imported: {missing_runtime() or exc}"
            ) from exc

    @property
    def device_type(self) -> str:
        """The torch device type, ``rbln``."""
        return "rbln"

    @property
    def torch_module_name(self) -> str:
        """The torch module, ``torch.rbln``."""
        return "rbln"

    @property
    def ops_cls(self) -> type[DeviceOps]:
        """The device operations, imported on first use."""
        # First Party
        from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps

        return RblnDeviceOps

    def is_available(self) -> bool:
        """Tell whether LMCache can run on RBLN here, without opening an NPU.

        Returns:
            True if torch-rbln, its runtime and at least one NPU are there. False
            otherwise, with one warning that says why if torch-rbln is installed.

        Raises:
            RuntimeError: If RBLN is not available although
                ``LMCACHE_DEVICE_BACKEND=rbln`` asks for it.
        """
        reason = _unavailable_reason()
        if reason is None:
            return True
        if is_pinned():
            raise RuntimeError(
                f"{BACKEND_ENV_VAR}=rbln, but {reason}. Fix that, or unset "
                f"{BACKEND_ENV_VAR} to let LMCache choose another device"
            )
        if not self._warned and importlib.util.find_spec("torch_rbln") is not None:
            RblnDeviceSpec._warned = True
            logger.warning(
                "torch-rbln is installed, but LMCache does not use RBLN: %s. It runs "
                "on another device or on the CPU; set %s=rbln to stop instead",
                reason,
                BACKEND_ENV_VAR,
            )
        return False

    def is_lmcache_driven_available(self) -> bool:
        """Return False: transfers are engine-driven only, also under ``auto``."""
        return False

    @property
    def async_engine_driven_context_cls(
        self,
    ) -> type[AsyncEngineDrivenTransferContext]:
        """The worker's transfers, imported on first use."""
        # First Party
        from lmcache.v1.platform.devices.rbln.transfer_context import (
            RblnTransferContext,
        )

        return RblnTransferContext

    def check_engine_groups(
        self,
        kv_caches: Mapping[str, Any],
        engine_group_infos: Sequence[EngineGroupInfo],
    ) -> None:
        """Refuse KV cache groups whose blocks a transfer would confuse.

        Args:
            kv_caches: KV tensor by layer name.
            engine_group_infos: The engine's groups.

        Raises:
            ValueError: Naming the group and the reason.
        """
        # First Party
        from lmcache.v1.platform.devices.rbln.engine_groups import (
            require_movable,
        )

        require_movable(kv_caches, engine_group_infos)


def _unavailable_reason() -> str | None:
    """Return why RBLN can't be used, or None if it can."""
    # Third Party
    import torch

    rbln = getattr(torch, "rbln", None)
    if rbln is None:
        if importlib.util.find_spec("torch_rbln") is None:
            return "torch_rbln is not installed; install torch-rbln and rebel-compiler"
        missing = missing_runtime()
        if missing is not None:
            return f"torch-rbln lacks its runtime. {missing}"
        autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
        if autoload != "1":
            return (
                "torch did not load torch_rbln because "
                f"TORCH_DEVICE_BACKEND_AUTOLOAD={autoload}; unset it"
            )
        return "torch did not load torch_rbln; run `python -m torch_rbln.diagnose`"
    try:
        if rbln.is_available():
            return None
    except Exception as exc:
        # torch-rbln before 0.12 raised here for NPUs that it could not register.
        return f"torch.rbln can't be used: {exc}"
    return (
        "torch.rbln sees no NPU; check `rbln-smi` and RBLN_VISIBLE_DEVICES"
        f"={os.environ.get('RBLN_VISIBLE_DEVICES', '')!r}"
    )
