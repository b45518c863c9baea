// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

/// Defines transfer(), first_unlike() and PIECE_COLUMNS in the module.
void define_transfer(pybind11::module_& module);
