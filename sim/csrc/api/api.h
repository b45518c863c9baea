// SPDX-License-Identifier: Apache-2.0
//
// What every exported call does around its own work.
#pragma once

#include "device/owner.h"
#include "refusal.h"
#include "settings.h"

namespace rbln_sim {

/// Run the body of a call that uses an NPU: refused in a child forked from an owner,
/// and when a setting is wrong.
template <typename Body>
RetCode use(const char* function, Body&& body) noexcept {
  return guarded(function, [&] {
    refuse_forked();
    settings();
    body();
  });
}

template <typename T>
T& out(T* pointer) {
  if (pointer == nullptr) refuse(kInvalid, "the pointer for the result is null");
  return *pointer;
}

}  // namespace rbln_sim
