# SPDX-License-Identifier: Apache-2.0
"""Device functions of RBLN kernels: none, since kernel bodies never run."""

from ....._unsupported import missing_attribute

__getattr__ = missing_attribute("rebel.triton.language.extra.rbln.libdevice")
