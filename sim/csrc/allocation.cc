// SPDX-License-Identifier: Apache-2.0
#include "allocation.h"

#include <cstring>

#include "address_space.h"
#include "counters.h"

namespace rbln_sim {
namespace {

Span part(const std::shared_ptr<Bytes>& bytes, uint64_t offset) {
  return {bytes->data() + offset, bytes};
}

}  // namespace

Allocation::Allocation(Device& device, uint64_t base, uint64_t size)
    : device_(device), base_(base), size_(size) {}

Allocation::~Allocation() {
  if (device_copy_) device_.ledger.release(size_);
  AddressSpace::instance().give_back(base_);
}

Allocation::Residency Allocation::residency() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return residency_;
}

bool Allocation::is_on_device() const {
  return residency_ == Residency::kDevice || residency_ == Residency::kBoth;
}

bool Allocation::on_device() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_on_device();
}

void Allocation::ensure_host() {
  if (!host_copy_) host_copy_ = std::make_shared<Bytes>(size_);
}

void Allocation::ensure_device() {
  if (device_copy_) return;
  device_.ledger.charge(size_);
  try {
    device_copy_ = std::make_shared<Bytes>(size_);
  } catch (...) {
    device_.ledger.release(size_);
    throw;
  }
}

void Allocation::to_device(bool overwritten) {
  ensure_device();
  if (!overwritten) {
    if (residency_ == Residency::kHost) {
      std::memcpy(device_copy_->data(), host_copy_->data(), size_);
      counters().sync_h2d.add(size_);
    } else if (residency_ == Residency::kZero) {
      device_copy_->zero();
    }
  }
  residency_ = Residency::kDevice;
  host_copy_.reset();
}

void Allocation::bind() {
  std::lock_guard<std::mutex> lock(mutex_);
  to_device(false);
  bound_ = true;
}

Span Allocation::device_view(uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  to_device(false);
  return part(device_copy_, offset);
}

void Allocation::mark_zeros() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bound_) {
    device_copy_->zero();
    return;
  }
  residency_ = Residency::kZero;
  host_copy_.reset();
}

Span Allocation::host_read(uint64_t offset, uint64_t length) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (residency_ == Residency::kDevice) {
    counters().sync_d2h.add(length);
    return part(device_copy_, offset);
  }
  ensure_host();
  return part(host_copy_, offset);
}

Span Allocation::host_write(uint64_t offset, uint64_t length) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bound_ || (residency_ == Residency::kDevice && !whole(length))) {
    counters().sync_h2d.add(length);
    return part(device_copy_, offset);
  }
  ensure_host();
  residency_ = Residency::kHost;
  return part(host_copy_, offset);
}

Span Allocation::device_read(uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_on_device() ? part(device_copy_, offset) : Span{};
}

Span Allocation::device_write(uint64_t offset, uint64_t length) {
  std::lock_guard<std::mutex> lock(mutex_);
  to_device(whole(length));
  return part(device_copy_, offset);
}

Span Allocation::borrow(uint64_t offset, uint64_t length, bool overwrite) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (residency_ == Residency::kDevice) {
    if (!bound_ && !overwrite && whole(length)) {
      ensure_host();
      std::memcpy(host_copy_->data(), device_copy_->data(), size_);
      counters().sync_d2h.add(size_);
      residency_ = Residency::kBoth;
      return part(host_copy_, 0);
    }
    // The device copy stays the newest: lend a copy of the part asked for. Bringing down
    // all of it would let two borrowers of distinct parts overwrite each other.
    auto scratch = std::make_shared<Bytes>(length);
    if (!overwrite) {
      std::memcpy(scratch->data(), device_copy_->data() + offset, length);
      counters().sync_d2h.add(length);
    }
    return part(scratch, 0);
  }
  ensure_host();
  return part(host_copy_, offset);
}

void Allocation::take_back(uint64_t offset, uint64_t length, const Span& borrowed) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (borrowed.owner == host_copy_) {
      residency_ = Residency::kHost;
      return;
    }
  }
  const Span target = host_write(offset, length);
  std::memcpy(target.bytes, borrowed.bytes, length);
}

void Allocation::set_info(rbln::DataType user, rbln::DataType physical,
                          const std::vector<int64_t>& shape) {
  std::lock_guard<std::mutex> lock(mutex_);
  user_dtype_ = user;
  physical_dtype_ = physical;
  shape_ = shape;
}

rbln::MemoryInfo Allocation::info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {device_.id(), base_, user_dtype_, shape_, physical_dtype_, shape_};
}

}  // namespace rbln_sim
