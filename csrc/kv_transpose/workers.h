// SPDX-License-Identifier: Apache-2.0
//
// Helper threads of this process, started when first wanted and kept.
#pragma once

#include <cstddef>
#include <functional>

namespace kv_transpose {

/// More threads than any machine has memory bandwidth for.
constexpr int kMaxThreads = 64;

/// Calls `work(0)` to `work(count - 1)`, each once, in any order, in the calling thread
/// and up to `threads - 1` helpers; returns when all have returned. Helpers that serve
/// another caller are not waited for. `threads` is kMaxThreads at most. `work` must not
/// throw.
void share(size_t count, int threads, const std::function<void(size_t)>& work);

}  // namespace kv_transpose
