// SPDX-License-Identifier: Apache-2.0
//
// Copies. A synchronous one orders behind the calling thread's current stream. An
// asynchronous one needs its device bytes in device memory; otherwise it is made
// synchronously and its handle is 0.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>

#include "api/api.h"
#include "memory/counters.h"
#include "memory/memory.h"
#include "stream/operation.h"
#include "stream/random.h"
#include "stream/stream.h"

using namespace rbln_sim;

namespace {

struct HostCopy {
  char* host;
  Range range;
};

HostCopy check_host_copy(uint64_t host, uint64_t vaddr, uint64_t bytes) {
  if (bytes == 0) refuse(kInvalid, "a copy of 0 bytes was asked for");
  Range range = resolve(vaddr, bytes);
  return {host_pointer(host, bytes), std::move(range)};
}

using Crossing = Operation::Crossing;

Crossing one_piece(bool crossed, uint64_t bytes) {
  return crossed ? Crossing{bytes, 1} : Crossing{};
}

Crossing host_to_device(const HostCopy& copy) {
  const Range& to = copy.range;
  return one_piece(to.allocation->write(to.offset, to.length, copy.host), to.length);
}

Crossing device_to_host(const HostCopy& copy) {
  const Range& from = copy.range;
  return one_piece(from.allocation->read(from.offset, from.length, copy.host),
                   from.length);
}

uint32_t device_of(const Range& range) { return range.allocation->device().id(); }

void drain_for(const Range& range) { drain_current_stream(device_of(range)); }

// One copy in the calling thread, whose device is `device`.
template <typename Body>
void copy_here(Kind kind, uint32_t device, uint64_t bytes, Body&& body) {
  perform({kind, device, bytes, 1}, [&](uint64_t) { return body(); });
}

// The first `pieces` entries of a batch of `count`, in the order in which to copy them.
// None is promised, so in deferred mode the schedule chooses one.
std::vector<size_t> order_of(size_t count, uint64_t pieces) {
  std::vector<size_t> order(std::min<uint64_t>(count, pieces));
  std::iota(order.begin(), order.end(), size_t{0});
  if (settings().schedule == Schedule::kLatest) {
    std::reverse(order.begin(), order.end());
  }
  if (settings().schedule != Schedule::kSeeded) return order;
  static std::atomic<uint64_t> batches{0};
  const uint64_t batch = scramble(settings().schedule_seed + batches.fetch_add(1));
  for (size_t left = order.size(); left > 1; --left) {
    std::swap(order[left - 1], order[scramble(batch + left) % left]);
  }
  return order;
}

// A batch in the calling thread is one operation, on the device of its first entry.
template <typename Copy, typename CopyOne>
void copy_batch(Kind kind, uint32_t device, const std::vector<rbln::CopyEntry>& entries,
                const std::vector<Copy>& copies, CopyOne&& copy_one) {
  uint64_t bytes = 0;
  for (const auto& [src, dst, length] : entries) bytes += length;
  perform({kind, device, bytes, copies.size()}, [&](uint64_t pieces) {
    Crossing crossing;
    for (const size_t i : order_of(copies.size(), pieces)) {
      crossing += copy_one(copies[i]);
    }
    return crossing;
  });
}

struct DeviceCopy {
  Range from;
  Range to;
};

DeviceCopy check_device_copy(uint64_t src, uint64_t dst, uint64_t bytes) {
  if (bytes == 0) refuse(kInvalid, "a copy of 0 bytes was asked for");
  return {resolve(src, bytes), resolve(dst, bytes)};
}

// Whether the device can copy between them: the bytes of different data types lie
// differently there.
bool same_format(const DeviceCopy& copy) {
  const rbln::DataType from = copy.from.allocation->physical_dtype();
  const rbln::DataType to = copy.to.allocation->physical_dtype();
  return from == to || from == rbln::DataType::Undefined ||
         to == rbln::DataType::Undefined;
}

// Copies on the device what can be copied there; the host serves the rest.
Crossing device_to_device(const DeviceCopy& copy) {
  const auto& [from, to] = copy;
  const auto write = [&range = copy.to](const char* bytes) {
    perform_hidden(Kind::kH2D, device_of(range), range.length, [&] {
      return one_piece(range.allocation->write(range.offset, range.length, bytes),
                       range.length);
    });
  };
  const auto [source, on_device] = from.allocation->source(from.offset);
  if (!on_device) {
    counters().hidden[kSrcNotOnDevice].add(from.length);
    counters().reject[kRejectSrcNotOnDevice].add(from.length);
    write(source.bytes);
    return {};
  }
  if (!same_format(copy)) {
    counters().hidden[kSrcDeviceOnly].add(from.length);
    counters().reject[kRejectDtypeMismatch].add(from.length);
    const Bytes bounce(from.length);
    perform_hidden(
        Kind::kD2H, device_of(from), from.length, [&range = copy.from, &bounce] {
          return one_piece(
              range.allocation->read(range.offset, range.length, bounce.data()),
              range.length);
        });
    write(bounce.data());
    return {};
  }
  const Span target = to.allocation->device_target(to.offset, to.length);
  copy_now(target.bytes, source.bytes, to.length);
  return {to.length, 1};
}

// The entries of a batch may be copied in any order.
void refuse_overlap(std::vector<std::pair<uint64_t, uint64_t>> destinations) {
  std::sort(destinations.begin(), destinations.end());
  for (size_t i = 1; i < destinations.size(); ++i) {
    const auto& [before, length] = destinations[i - 1];
    if (destinations[i].first - before < length) {
      refuse(kInvalid, "two entries of the batch write the same bytes: ", length,
             " bytes at ", hex(before), " and ", destinations[i].second, " bytes at ",
             hex(destinations[i].first));
    }
  }
}

void refuse_overlap_of(const std::vector<rbln::CopyEntry>& entries) {
  std::vector<std::pair<uint64_t, uint64_t>> destinations;
  destinations.reserve(entries.size());
  for (const auto& [src, dst, bytes] : entries) destinations.emplace_back(dst, bytes);
  refuse_overlap(std::move(destinations));
}

void drain_for(const std::vector<HostCopy>& copies) {
  std::set<uint32_t> devices;
  for (const HostCopy& copy : copies) devices.insert(device_of(copy.range));
  for (const uint32_t id : devices) drain_current_stream(id);
}

}  // namespace

namespace rbln {

RetCode rbln_memcpy_h2v(uint64_t src, uint64_t dst, uint64_t bytes) {
  return use(__func__, [&] {
    const HostCopy copy = check_host_copy(src, dst, bytes);
    drain_for(copy.range);
    copy_here(Kind::kH2D, device_of(copy.range), bytes,
              [&] { return host_to_device(copy); });
  });
}

RetCode rbln_memcpy_v2h(uint64_t src, uint64_t dst, uint64_t bytes) {
  return use(__func__, [&] {
    const HostCopy copy = check_host_copy(dst, src, bytes);
    drain_for(copy.range);
    copy_here(Kind::kD2H, device_of(copy.range), bytes,
              [&] { return device_to_host(copy); });
  });
}

RetCode rbln_memcpy_v2v(uint64_t src, uint64_t dst, uint64_t bytes) {
  return use(__func__, [&] {
    const DeviceCopy copy = check_device_copy(src, dst, bytes);
    drain_for(copy.from);
    drain_for(copy.to);
    copy_here(Kind::kD2D, device_of(copy.from), bytes,
              [&] { return device_to_device(copy); });
  });
}

RetCode rbln_memcpy_h2v_async(uint64_t src, uint64_t dst, uint64_t bytes,
                              uint64_t* handle) {
  return use(__func__, [&] {
    uint64_t& ticket = out(handle);
    const HostCopy copy = check_host_copy(src, dst, bytes);
    const Range& to = copy.range;
    if (!to.allocation->on_device()) {
      drain_for(to);
      copy_here(Kind::kH2D, device_of(to), bytes, [&] { return host_to_device(copy); });
      ticket = 0;
      return;
    }
    const auto stream = current_stream(device_of(to));
    const Span target = to.allocation->device_target(to.offset, to.length);
    ticket = copy_on(*stream, {Kind::kH2D, target.bytes, copy.host, to.length,
                               to.allocation, nullptr});
  });
}

RetCode rbln_memcpy_v2h_async(uint64_t src, uint64_t dst, uint64_t bytes,
                              uint64_t* handle) {
  return use(__func__, [&] {
    uint64_t& ticket = out(handle);
    const HostCopy copy = check_host_copy(dst, src, bytes);
    const Range& from = copy.range;
    const auto [source, on_device] = from.allocation->source(from.offset);
    if (!on_device || !from.allocation->host_view_known()) {
      drain_for(from);
      copy_here(Kind::kD2H, device_of(from), bytes,
                [&] { return device_to_host(copy); });
      ticket = 0;
      return;
    }
    const auto stream = current_stream(device_of(from));
    ticket = copy_on(*stream, {Kind::kD2H, copy.host, source.bytes, from.length,
                               nullptr, from.allocation});
  });
}

RetCode rbln_memcpy_v2v_async(uint64_t src, uint64_t dst, uint64_t bytes,
                              uint64_t* handle) {
  return use(__func__, [&] {
    uint64_t& ticket = out(handle);
    const DeviceCopy copy = check_device_copy(src, dst, bytes);
    const auto& [from, to] = copy;
    const bool one_device = &from.allocation->device() == &to.allocation->device();
    const auto [source, on_device] = from.allocation->source(from.offset);
    if (!one_device || !on_device || !same_format(copy)) {
      drain_for(from);
      drain_for(to);
      copy_here(Kind::kD2D, device_of(from), bytes,
                [&] { return device_to_device(copy); });
      ticket = 0;
      return;
    }
    const auto stream = current_stream(device_of(from));
    const Span target = to.allocation->device_target(to.offset, to.length);
    ticket = copy_on(*stream, {Kind::kD2D, target.bytes, source.bytes, to.length,
                               to.allocation, from.allocation});
  });
}

RetCode rbln_memcpy_h2v_multi(const std::vector<CopyEntry>& entries) {
  return use(__func__, [&] {
    std::vector<HostCopy> copies;
    for (const auto& [src, dst, bytes] : entries) {
      copies.push_back(check_host_copy(src, dst, bytes));
    }
    refuse_overlap_of(entries);
    if (copies.empty()) return;
    drain_for(copies);
    copy_batch(Kind::kH2D, device_of(copies[0].range), entries, copies, host_to_device);
  });
}

RetCode rbln_memcpy_v2h_multi(const std::vector<CopyEntry>& entries) {
  return use(__func__, [&] {
    std::vector<HostCopy> copies;
    for (const auto& [src, dst, bytes] : entries) {
      copies.push_back(check_host_copy(dst, src, bytes));
    }
    refuse_overlap_of(entries);
    if (copies.empty()) return;
    drain_for(copies);
    copy_batch(Kind::kD2H, device_of(copies[0].range), entries, copies, device_to_host);
  });
}

RetCode rbln_memcpy_v2v_multi(const std::vector<CopyEntry>& entries) {
  return use(__func__, [&] {
    std::vector<DeviceCopy> copies;
    for (const auto& [src, dst, bytes] : entries) {
      copies.push_back(check_device_copy(src, dst, bytes));
    }
    refuse_overlap_of(entries);
    for (const DeviceCopy& copy : copies) {
      drain_for(copy.from);
      drain_for(copy.to);
    }
    if (copies.empty()) return;
    copy_batch(Kind::kD2D, device_of(copies[0].from), entries, copies,
               device_to_device);
  });
}

}  // namespace rbln
