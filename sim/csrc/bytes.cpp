// SPDX-License-Identifier: Apache-2.0
#include "bytes.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace rbln_sim {
namespace {

// Below this a mapping per buffer costs more than it saves, and a process may only hold
// some 65,000 mappings.
constexpr size_t kMapFrom = 256 << 10;
constexpr size_t kAlignment = 64;

}  // namespace

Bytes::Bytes(size_t size) : size_(size) {
  if (mapped()) {
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(at);
    return;
  }
  // Also of no bytes: aligned_alloc may answer null to a size of 0.
  const size_t rounded = (size / kAlignment + 1) * kAlignment;
  data_ = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, rounded);
}

Bytes::~Bytes() {
  if (mapped()) {
    munmap(data_, size_);
  } else {
    std::free(data_);
  }
}

void Bytes::zero() {
  // Dropping private anonymous pages makes them read as zero.
  if (mapped() && madvise(data_, size_, MADV_DONTNEED) == 0) return;
  std::memset(data_, 0, size_);
}

bool Bytes::mapped() const { return size_ >= kMapFrom; }

}  // namespace rbln_sim
