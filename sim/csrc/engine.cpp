// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "operation.h"

namespace rbln_sim {

void copy_now(char* dst, const char* src, uint64_t bytes) {
  std::memmove(dst, src, bytes);
}

uint64_t copy_on(Stream& stream, CopyJob job) {
  Operation operation({job.kind, stream.device(), job.bytes, 1},
                      static_cast<uint32_t>(stream.handle()));
  const Copied copied{job.dst, job.src, job.bytes};
  const bool poisons = operation.disturbed() && scheduler() == nullptr;
  Work work([job = std::move(job), operation, copied, poisons]() mutable {
    if (poisons) poison(copied);
    operation.start();
    copy_now(job.dst, job.src, operation.fails() ? job.bytes / 2 : job.bytes);
    operation.finish();
  });
  work.copied = copied;
  work.due = operation.due();
  return stream.submit(std::move(work));
}

}  // namespace rbln_sim
