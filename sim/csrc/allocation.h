// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "abi.h"
#include "bytes.h"
#include "device.h"

namespace rbln_sim {

/// A piece of an allocation's bytes, valid while `owner` lives.
struct Span {
  char* bytes = nullptr;
  std::shared_ptr<Bytes> owner;
};

/// One allocation: an address range and up to two copies of its bytes, one in (simulated)
/// device memory and one in host memory.
///
/// The residency says which copy is the newest:
///   kEmpty   never written, neither copy need exist
///   kZero    logically zero, neither copy need exist
///   kHost    the host copy
///   kDevice  the device copy
///   kBoth    both
/// A *bound* allocation always is kDevice: that is where a KV cache lives. Operations on
/// distinct parts of a bound allocation do not wait for each other.
///
/// Offsets and lengths are checked by the caller. Methods that make a device copy throw
/// Refusal when the device is out of memory.
class Allocation {
 public:
  enum class Residency { kEmpty, kZero, kHost, kDevice, kBoth };

  Allocation(Device& device, uint64_t base, uint64_t size);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  Device& device() const { return device_; }
  uint64_t base() const { return base_; }
  uint64_t size() const { return size_; }
  Residency residency() const;
  bool on_device() const;

  /// Keep the bytes in device memory from now on.
  void bind();
  /// Make the device copy the newest and the only one, as for a graph that may write.
  Span device_view(uint64_t offset);
  void mark_zeros();

  /// Newest bytes, for a synchronous read by the host; a read from device memory is
  /// counted.
  Span host_read(uint64_t offset, uint64_t length);
  /// Where a synchronous write by the host goes; a write to device memory is counted.
  Span host_write(uint64_t offset, uint64_t length);
  /// Device memory, if the newest bytes are there; else a null span.
  Span device_read(uint64_t offset);
  /// Device memory for a write of `length` bytes. Bytes that the write leaves alone are
  /// brought to the device first. The device copy is the newest afterwards.
  Span device_write(uint64_t offset, uint64_t length);

  /// Host memory holding `length` bytes at `offset`, or memory to be filled if
  /// `overwrite`. Give it to `take_back` in the end.
  Span borrow(uint64_t offset, uint64_t length, bool overwrite);
  /// The borrowed bytes were changed: they become the newest.
  void take_back(uint64_t offset, uint64_t length, const Span& borrowed);

  void set_info(rbln::DataType user, rbln::DataType physical,
                const std::vector<int64_t>& shape);
  rbln::MemoryInfo info() const;

 private:
  bool is_on_device() const;
  bool whole(uint64_t length) const { return length == size_; }
  void ensure_host();
  void ensure_device();
  // Bring the newest bytes to the device; `overwritten`: they need not be moved.
  void to_device(bool overwritten);

  Device& device_;
  const uint64_t base_;
  const uint64_t size_;

  mutable std::mutex mutex_;
  Residency residency_ = Residency::kEmpty;
  bool bound_ = false;
  std::shared_ptr<Bytes> host_copy_;
  // Once made it stays until the allocation dies, so device views stay valid.
  std::shared_ptr<Bytes> device_copy_;
  rbln::DataType user_dtype_ = rbln::DataType::Undefined;
  rbln::DataType physical_dtype_ = rbln::DataType::Undefined;
  std::vector<int64_t> shape_;
};

}  // namespace rbln_sim
