// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace rbln_sim {

/// Hands out device addresses.
///
/// They lie in a range that the process has reserved without access, so that a host
/// dereference of a device address faults instead of reading something. A freed range
/// is reused as late as possible, and every range is followed by a gap, so stale and
/// overrunning addresses hit nothing.
class AddressSpace {
 public:
  static AddressSpace& instance();

  /// Reserve `size` bytes; throws Refusal when no range is left.
  uint64_t take(uint64_t size);
  void give_back(uint64_t base);
  /// Whether the address was or could be handed out.
  bool contains(uint64_t address) const { return address >= begin_ && address < end_; }

#ifdef __SANITIZE_THREAD__
  // ThreadSanitizer keeps most of the address space for itself.
  static constexpr uint64_t kReservation = 1ull << 38;
#else
  static constexpr uint64_t kReservation = 1ull << 42;
#endif
  static constexpr uint64_t kAlignment = 4096;
  static constexpr uint64_t kGap = 64 << 10;

 private:
  AddressSpace();

  uint64_t begin_;
  uint64_t end_;
  std::mutex mutex_;
  uint64_t cursor_;
  std::map<uint64_t, uint64_t> taken_;  // base -> end, gap included
};

/// A zero-filled buffer that takes host memory only where it is written.
class Bytes {
 public:
  /// Throws std::bad_alloc.
  explicit Bytes(size_t size);
  ~Bytes();
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  /// Make all bytes zero again, giving memory back where that is possible.
  void zero();

 private:
  bool mapped() const;
  size_t size_;
  char* data_;
};

}  // namespace rbln_sim
