// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "api/abi.h"
#include "device/device.h"
#include "memory/space.h"

namespace rbln_sim {

/// A piece of an allocation's bytes, valid while `owner` lives.
struct Span {
  char* bytes = nullptr;
  std::shared_ptr<Bytes> owner;
};

/// One allocation: an address range, and its bytes in simulated device memory or in
/// host memory. The residency says where the newest bytes are:
///   kEmpty   nowhere: never written
///   kZero    nowhere: logically zero
///   kHost    in host memory
///   kDevice  in device memory
/// A *bound* allocation is kDevice for good: that is how a KV cache lives.
///
/// Operations on distinct parts may run in several threads at once. On device bytes
/// they do not wait for each other; host bytes move under the lock, because another
/// thread may bring all of them to the device meanwhile.
///
/// Offsets and lengths are checked by the caller. What needs device memory throws
/// Refusal when there is none left.
class Allocation {
 public:
  Allocation(Device& device, uint64_t base, uint64_t size);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  Device& device() const { return device_; }
  uint64_t base() const { return base_; }
  uint64_t size() const { return size_; }
  bool on_device() const;

  /// Keep the bytes in device memory from now on.
  void bind();
  void mark_zeros();

  /// Synchronous copies from and to host memory. One that crosses to the device is
  /// counted, and told by returning true. `from` may point into the same allocation.
  bool read(uint64_t offset, uint64_t length, char* to);
  bool write(uint64_t offset, uint64_t length, const char* from);

  struct Source {
    Span span;
    bool on_device;
  };
  /// The newest bytes, to read from.
  Source source(uint64_t offset);
  /// Device bytes to write to. Bytes that the write leaves alone are brought there
  /// first.
  Span device_target(uint64_t offset, uint64_t length);

  struct Loan {
    Span span;
    /// The bytes were brought from the device.
    bool crossed;
  };
  /// Host memory holding `length` bytes at `offset`, or memory to be filled if
  /// `overwrite`.
  Loan borrow(uint64_t offset, uint64_t length, bool overwrite);
  /// The borrowed bytes were changed: they become the newest. Returns whether they were
  /// brought to the device.
  bool take_back(uint64_t offset, uint64_t length, const Span& borrowed);

  /// False after device bytes changed without the runtime's knowledge: what the host
  /// reads is poison until it is true again, or the host writes.
  void set_host_view_known(bool known) { host_view_known_ = known; }
  bool host_view_known() const { return host_view_known_; }

  void set_info(rbln::DataType user, rbln::DataType physical,
                const std::vector<int64_t>& shape);
  rbln::MemoryInfo info() const;
  /// Of the bytes in device memory; Undefined if nobody told.
  rbln::DataType physical_dtype() const;

 private:
  enum class Residency { kEmpty, kZero, kHost, kDevice };

  // All of these want the lock held.
  bool writes_to_device(uint64_t length) const;
  void ensure_host();
  void ensure_device();
  void to_device(bool overwritten);

  Device& device_;
  const uint64_t base_;
  const uint64_t size_;

  mutable std::mutex mutex_;
  Residency residency_ = Residency::kEmpty;
  bool bound_ = false;
  std::atomic<bool> host_view_known_{true};
  // All zero while the residency is kEmpty or kZero.
  std::shared_ptr<Bytes> host_;
  // Once made it stays until the allocation dies, so that device views stay valid.
  std::shared_ptr<Bytes> device_bytes_;
  rbln::DataType user_dtype_ = rbln::DataType::Undefined;
  rbln::DataType physical_dtype_ = rbln::DataType::Undefined;
  std::vector<int64_t> shape_;
};

}  // namespace rbln_sim
