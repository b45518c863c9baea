// SPDX-License-Identifier: Apache-2.0
#include "memory/space.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "refusal.h"

namespace rbln_sim {

AddressSpace& AddressSpace::instance() {
  static AddressSpace* space = new AddressSpace();
  return *space;
}

AddressSpace::AddressSpace() {
  void* at = mmap(nullptr, kReservation, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    refuse(kFailure, "cannot reserve ", kReservation >> 30,
           " GiB of addresses for the device; is `ulimit -v` set?");
  }
  begin_ = reinterpret_cast<uint64_t>(at);
  end_ = begin_ + kReservation;
  cursor_ = begin_;
}

uint64_t AddressSpace::take(uint64_t size) {
  if (size > kReservation / 2) {
    refuse(kFailure, "cannot reserve ", size, " bytes of device addresses");
  }
  const uint64_t length = (size + kAlignment - 1) / kAlignment * kAlignment + kGap;
  std::lock_guard<std::mutex> lock(mutex_);
  // Next fit: go on from the last range, wrap around once.
  for (int round = 0; round < 2; ++round) {
    for (auto next = taken_.lower_bound(cursor_);; ++next) {
      const uint64_t limit = next == taken_.end() ? end_ : next->first;
      if (limit >= cursor_ + length) {
        const uint64_t base = cursor_;
        cursor_ += length;
        taken_.emplace(base, cursor_);
        return base;
      }
      if (next == taken_.end()) break;
      cursor_ = next->second;
    }
    cursor_ = begin_;
  }
  refuse(kFailure, "no device address range of ", size, " bytes is left");
}

void AddressSpace::give_back(uint64_t base) {
  std::lock_guard<std::mutex> lock(mutex_);
  taken_.erase(base);
}

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
