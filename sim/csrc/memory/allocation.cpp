// SPDX-License-Identifier: Apache-2.0
#include "memory/allocation.h"

#include <cstring>

#include "memory/counters.h"
#include "memory/space.h"
#include "stream/operation.h"

namespace rbln_sim {
namespace {

Span part(const std::shared_ptr<Bytes>& bytes, uint64_t offset) {
  return {bytes->data() + offset, bytes};
}

}  // namespace

Allocation::Allocation(Device& device, uint64_t base, uint64_t size)
    : device_(device), base_(base), size_(size) {}

Allocation::~Allocation() {
  if (device_bytes_) device_.ledger.release(size_);
  AddressSpace::instance().give_back(base_);
}

bool Allocation::on_device() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return residency_ == Residency::kDevice;
}

void Allocation::ensure_host() {
  if (!host_) host_ = std::make_shared<Bytes>(size_);
}

void Allocation::ensure_device() {
  if (device_bytes_) return;
  device_.ledger.charge(size_);
  try {
    device_bytes_ = std::make_shared<Bytes>(size_);
  } catch (...) {
    device_.ledger.release(size_);
    throw;
  }
}

void Allocation::to_device(bool overwritten) {
  ensure_device();
  if (residency_ == Residency::kHost && !overwritten) {
    perform_hidden(Kind::kH2D, device_.id(), size_, [&]() -> Operation::Crossing {
      copy_now(device_bytes_->data(), host_->data(), size_);
      return {size_, 1};
    });
    counters().sync_h2d.add(size_);
  } else if (residency_ == Residency::kZero && !overwritten) {
    device_bytes_->zero();
  }
  residency_ = Residency::kDevice;
  host_.reset();
}

void Allocation::bind() {
  std::lock_guard<std::mutex> lock(mutex_);
  to_device(false);
  bound_ = true;
}

void Allocation::mark_zeros() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bound_) {
    device_bytes_->zero();
    return;
  }
  residency_ = Residency::kZero;
  host_.reset();
}

bool Allocation::writes_to_device(uint64_t length) const {
  // A write of everything leaves nothing worth keeping on the device; unless bound, it
  // waits on the host for the next use there.
  return bound_ || (residency_ == Residency::kDevice && length != size_);
}

bool Allocation::read(uint64_t offset, uint64_t length, char* to) {
  Span source;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (residency_ != Residency::kDevice) {
      ensure_host();
      copy_now(to, host_->data() + offset, length);
      return false;
    }
    source = part(device_bytes_, offset);
  }
  counters().sync_d2h.add(length);
  if (!host_view_known_) {
    std::memset(to, kPoison, length);
    return true;
  }
  copy_now(to, source.bytes, length);
  return true;
}

bool Allocation::write(uint64_t offset, uint64_t length, const char* from) {
  host_view_known_ = true;
  Span target;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!writes_to_device(length)) {
      ensure_host();
      copy_now(host_->data() + offset, from, length);
      residency_ = Residency::kHost;
      return false;
    }
    target = part(device_bytes_, offset);
  }
  counters().sync_h2d.add(length);
  copy_now(target.bytes, from, length);
  return true;
}

Allocation::Source Allocation::source(uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (residency_ == Residency::kDevice) return {part(device_bytes_, offset), true};
  ensure_host();
  return {part(host_, offset), false};
}

Span Allocation::device_target(uint64_t offset, uint64_t length) {
  std::lock_guard<std::mutex> lock(mutex_);
  to_device(length == size_);
  return part(device_bytes_, offset);
}

Allocation::Loan Allocation::borrow(uint64_t offset, uint64_t length, bool overwrite) {
  Span source, lent;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (residency_ != Residency::kDevice) {
      ensure_host();
      return {part(host_, offset), false};
    }
    source = part(device_bytes_, offset);
  }
  // The device bytes stay the newest and a copy is lent. If all of them became
  // host-latest, what streams write to other parts meanwhile would be lost.
  lent = part(std::make_shared<Bytes>(length), 0);
  if (overwrite) return {lent, false};
  if (host_view_known_) {
    copy_now(lent.bytes, source.bytes, length);
  } else {
    std::memset(lent.bytes, kPoison, length);
  }
  counters().sync_d2h.add(length);
  return {lent, true};
}

bool Allocation::take_back(uint64_t offset, uint64_t length, const Span& borrowed) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (borrowed.owner == host_) {
      residency_ = Residency::kHost;
      return false;
    }
  }
  return write(offset, length, borrowed.bytes);
}

void Allocation::set_info(rbln::DataType user, rbln::DataType physical,
                          const std::vector<int64_t>& shape) {
  std::lock_guard<std::mutex> lock(mutex_);
  user_dtype_ = user;
  physical_dtype_ = physical;
  shape_ = shape;
}

rbln::DataType Allocation::physical_dtype() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return physical_dtype_;
}

rbln::MemoryInfo Allocation::info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {device_.id(), base_, user_dtype_, shape_, physical_dtype_, shape_};
}

}  // namespace rbln_sim
