// SPDX-License-Identifier: Apache-2.0
#include "pipeline.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "workers.h"

namespace kv_transpose {
namespace {

[[noreturn]] void refuse(const std::string& wanted) {
  throw std::invalid_argument("wanted " + wanted);
}

/// Buffers share this many parts each, if those are small enough.
constexpr int64_t kParts = 4;
/// Parts of a buffer start at multiples of this many bytes.
constexpr int64_t kAlignment = 64;
/// A transfer is cut into so many batches at least, unless they get too small.
constexpr int64_t kMinBatches = 24;

/// Staging of one type with the layers, divided.
struct Parts {
  std::vector<at::Tensor> memory;
  int64_t batch_bytes = 0;
};

Parts divide(const Plan& plan, const Resources& with) {
  const int64_t element = plan.element_size();
  int64_t room = INT64_MAX;
  for (const at::Tensor& buffer : with.staging) {
    if (buffer.scalar_type() != at::kByte || buffer.dim() != 1 ||
        !buffer.is_contiguous() || !buffer.device().is_cpu() ||
        buffer.storage_offset() % element != 0 ||
        static_cast<int64_t>(buffer.storage().nbytes()) <
            buffer.storage_offset() + buffer.numel()) {
      refuse(
          "staging as uint8 in host memory, of one dense axis and aligned to elements");
    }
    room = std::min(room, buffer.numel() / element * element);
  }
  if (room < plan.largest_bytes || room < element) {
    refuse("staging of " + std::to_string(plan.largest_bytes) +
           " bytes for the largest segment, got " + std::to_string(room));
  }
  int64_t size = room, batch = room;
  if (!with.collector.defined()) {
    const int64_t wanted = std::max(with.part_bytes, plan.largest_bytes);
    if (wanted <= room - kAlignment) {
      size = (wanted + kAlignment - 1) / kAlignment * kAlignment;
    }
    batch = std::min(size, std::max(with.batch_bytes, plan.bytes / kMinBatches));
  }
  Parts parts{{}, batch};
  for (const at::Tensor& buffer : with.staging) {
    const int64_t count = size == room ? 1 : std::min(kParts, room / size);
    const at::Tensor used = buffer.narrow(0, 0, count * size);
    for (at::Tensor& part :
         used.view(plan.layers.front().scalar_type()).split(size / element)) {
      parts.memory.push_back(std::move(part));
    }
  }
  return parts;
}

void check_resources(const Plan& plan, const Resources& with) {
  if (plan.memory != plan.current_memory()) {
    refuse("layers and chunks with the memory that was planned; it was resized since");
  }
  if (with.threads < 1 || with.threads > kMaxThreads) {
    refuse("threads of 1 to " + std::to_string(kMaxThreads) + ", got " +
           std::to_string(with.threads));
  }
  if (with.part_bytes < 1 || with.batch_bytes < 1) refuse("parts of at least 1 byte");
  if (with.staging.empty() && !plan.in_place) {
    refuse("staging, unless segments are contiguous in their chunks too");
  }
  if (!with.staging.empty() && plan.on_device) {
    refuse("no staging, with chunks on the device");
  }
  const at::Tensor &collector = with.collector, &layer = plan.layers.front();
  if (!collector.defined()) return;
  if (with.staging.empty()) refuse("staging with a collector");
  for (const at::Tensor& buffer : with.staging) {
    if (collector.scalar_type() != layer.scalar_type() || collector.dim() != 1 ||
        !collector.is_contiguous() || collector.device() != layer.device() ||
        collector.nbytes() < buffer.nbytes()) {
      refuse(
          "a collector of the layers' element type and device, of one dense axis and "
          "at least " +
          std::to_string(buffer.nbytes()) + " bytes");
    }
  }
}

/// Views elements [first, first + size) of a tensor, counted from its first one.
at::Tensor view(const at::Tensor& tensor, int64_t first, int64_t size) {
  constexpr int64_t kDense = 1;
  return at::as_strided(tensor, {&size, 1}, {&kDense, 1},
                        tensor.storage_offset() + first);
}

/// How long to look for the end of a part's copies before sleeping until it: about as
/// long as they take. A thread that sleeps is woken late, once per part.
constexpr std::chrono::microseconds kPollTime{100};

void wait_for(c10::Event& copied) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + kPollTime;
  // Others that want this CPU have it.
  while (!copied.query() && Clock::now() < end) std::this_thread::yield();
  copied.synchronize();
}

/// Events on the stream of a transfer, one behind each thing that may fail. Where a
/// single one stood behind several, a thread that waits for the whole device while they
/// are issued could be told of a failure in the transfer's place.
class Marks {
 public:
  explicit Marks(c10::Stream stream) : stream_(stream) {}

  void add() {
    if (used_ == events_.size()) events_.emplace_back(stream_.device_type());
    events_[used_++].record(stream_);
  }

  /// Waits until all is done. Throws if some of it failed.
  void wait() {
    if (used_ == 0) return;
    wait_for(events_[used_ - 1]);
    for (size_t index = 0; index + 1 < used_; ++index) {
      if (!events_[index].query()) events_[index].synchronize();
    }
    used_ = 0;
  }

 private:
  c10::Stream stream_;
  std::vector<c10::Event> events_;
  size_t used_ = 0;
};

/// Probes that fail before the device counts as lost.
constexpr int kMaxProbes = 64;
constexpr std::chrono::milliseconds kAskAgain{1};

/// Waits for an event, also where the device answers nothing but queries. Throws if
/// what is before it failed.
void wait_or_ask(c10::Event& event) {
  try {
    event.synchronize();
    return;
  } catch (const std::exception&) {
    // An old failure, or the wait itself failed.
  }
  while (!event.query()) std::this_thread::sleep_for(kAskAgain);
}

/// Keeps an error of Python with its exception. Where it stays the interpreter's, other
/// Python code fails because of it.
void take_from_python(std::exception& failure) {
  if (auto* error = dynamic_cast<python_error*>(&failure)) error->persist();
}

/// One transfer under way.
class Pipeline {
 public:
  Pipeline(const Plan& plan, const Resources& with)
      : plan_(plan), with_(with), tiles_(plan.tiles) {
    job_ = {plan.direction, nullptr, plan.windows.data(), plan.row_bytes, nullptr, 0};
    if (with.staging.empty()) {
      parts_.push_back({at::Tensor(), marks()});
      ends_.push_back(tiles_.size());
      return;
    }
    const Parts parts = divide(plan, with);
    for (const at::Tensor& memory : parts.memory) parts_.push_back({memory, marks()});
    pack(parts.batch_bytes);
  }

  void run() {
    const size_t batches = ends_.size();
    for (size_t batch = 0; batch < batches; ++batch) {
      if (batch >= parts_.size()) finish(batch - parts_.size());
      if (!to_host()) transpose(batch);
      copy(batch);
    }
    size_t batch = batches > parts_.size() ? batches - parts_.size() : 0;
    for (; batch < batches; ++batch) finish(batch);
  }

 private:
  /// A part of staging, and what is behind its copies.
  struct Part {
    at::Tensor memory;
    std::optional<Marks> copied;
  };

  bool to_host() const { return plan_.direction == Direction::kGather; }
  Part& part_of(size_t batch) { return parts_[batch % parts_.size()]; }
  size_t begin_of(size_t batch) const { return batch == 0 ? 0 : ends_[batch - 1]; }
  int64_t bytes_of(const Tile& tile) const { return tile.rows() * plan_.row_bytes; }

  std::optional<Marks> marks() const {
    if (!with_.lane) return std::nullopt;
    return Marks(with_.lane->stream);
  }

  /// Fills batch after batch without gaps; a segment that is larger has one of its own.
  void pack(int64_t room) {
    int64_t used = 0;
    for (size_t index = 0; index < tiles_.size(); ++index) {
      const int64_t bytes = bytes_of(tiles_[index]);
      if (used > 0 && bytes > room - used) {
        ends_.push_back(index);
        used = 0;
      }
      tiles_[index].staged = used;
      used += bytes;
    }
    ends_.push_back(tiles_.size());
  }

  at::Tensor on_device(size_t index) const {
    const Tile& tile = tiles_[index];
    return view(plan_.layers[static_cast<size_t>(tile.layer)], plan_.starts[index],
                bytes_of(tile) / plan_.element_size());
  }

  /// The other side of a segment's copy: staging or, in place, its chunk.
  at::Tensor opposite(const at::Tensor& staged, const Tile& tile) const {
    const auto chunk = static_cast<size_t>(tile.chunk);
    const bool in_place = !staged.defined();
    const int64_t first =
        in_place ? plan_.windows[chunk].offset(tile.plane, tile.layer, tile.token)
                 : tile.staged;
    return view(in_place ? plan_.chunks[chunk] : staged, first / plan_.element_size(),
                bytes_of(tile) / plan_.element_size());
  }

  /// Waits for the copies of a batch. Its part is free then.
  void finish(size_t batch) {
    if (part_of(batch).copied) part_of(batch).copied->wait();
    if (to_host()) transpose(batch);
  }

  void transpose(size_t batch) {
    if (!part_of(batch).memory.defined()) return;
    job_.staging = static_cast<char*>(part_of(batch).memory.data_ptr());
    job_.tiles = tiles_.data() + begin_of(batch);
    job_.num_tiles = static_cast<int64_t>(ends_[batch] - begin_of(batch));
    kv_transpose::run(job_, with_.threads);
  }

  /// Issues the copies of a batch.
  void copy(size_t batch) {
    Part& part = part_of(batch);
    const bool collects = with_.collector.defined();
    const at::Tensor& staged = collects ? with_.collector : part.memory;
    std::vector<at::Tensor> segments, others;
    int64_t used = 0;
    {
      // Nobody but the copies sees these views.
      const at::AutoDispatchBelowADInplaceOrView plain;
      for (size_t index = begin_of(batch); index < ends_[batch]; ++index) {
        segments.push_back(on_device(index));
        others.push_back(opposite(staged, tiles_[index]));
        used += segments.back().numel();
      }
    }
    if (!collects) {
      copy_all(others, segments, part.copied);
      return;
    }
    const std::vector<at::Tensor> across = {part.memory.narrow(0, 0, used)};
    const std::vector<at::Tensor> collected = {staged.narrow(0, 0, used)};
    if (!to_host()) copy_all(across, collected, part.copied);
    copy_all(others, segments, part.copied);
    if (to_host()) copy_all(across, collected, part.copied);
  }

  /// Issues copies between segments and what is on the other side.
  void copy_all(const std::vector<at::Tensor>& others,
                const std::vector<at::Tensor>& segments, std::optional<Marks>& copied) {
    const auto& targets = to_host() ? others : segments;
    const auto& sources = to_host() ? segments : others;
    // Inside of an NPU one by one: as a batch some make them a synchronous copy.
    const bool crosses = targets.front().device() != sources.front().device() ||
                         targets.front().is_cpu();
    if (!copied && crosses) {
      at::_foreach_copy_(targets, sources);
      return;
    }
    for (size_t index = 0; index < targets.size(); ++index) {
      const bool non_blocking = copied.has_value();
      if (crosses) {
        at::_foreach_copy_({&targets[index], 1}, {&sources[index], 1}, non_blocking);
      } else {
        targets[index].copy_(sources[index], non_blocking);
      }
      if (copied) copied->add();
    }
  }

  const Plan& plan_;
  const Resources& with_;
  std::vector<Tile> tiles_;
  std::vector<size_t> ends_;  // of each batch, the tile behind its last
  std::vector<Part> parts_;
  Job job_;
};

/// Issues copies on a lane's stream, behind the caller's current one.
template <typename Copies>
void run_on(const Lane& lane, const c10::Device device, Copies&& copies) {
  const c10::Stream stream = lane.stream;
  const c10::impl::VirtualGuardImpl of_device(device.type());
  const c10::Stream callers = of_device.getStream(device);
  if (stream.device() != device || stream == callers) {
    refuse("a stream of the layers' device, and not the caller's current one");
  }
  if (!lane.probe_to.defined() || lane.probe_from.device() != device ||
      lane.probe_to.nbytes() != lane.probe_from.nbytes()) {
    refuse("pinned and device memory alike to probe the stream with");
  }
  try {
    c10::Event before(device.type());
    before.record(callers);
    before.block(stream);
    // A failure of what the copies have to wait for is one of theirs.
    Marks begun(stream);
    begun.add();
    const c10::StreamGuard current(stream);
    copies();
    begun.wait();
  } catch (std::exception& failure) {
    take_from_python(failure);
    if (drain(lane)) throw;
    throw NotDrained(failure.what());
  }
}

/// Copies of one measurement: their time is fixed cost. They are many, since the first
/// one may have to wake the driver.
constexpr int kProbes = 32;
/// Copies of the first one, which shows whether the others would take too long.
constexpr int kFirstProbes = 4;
constexpr int64_t kProbeBytes = 4096;
constexpr int kRounds = 12;
/// Where copies take longer, in microseconds each, the fixed cost is lost in what makes
/// them so slow: another round would tell no more, and hold transfers up.
constexpr double kHopelessUs = 6000.0;

double time_of(const at::Tensor& to, const at::Tensor& from, int copies,
               const c10::Stream& stream) {
  using Clock = std::chrono::steady_clock;
  stream.synchronize();
  const Clock::time_point begin = Clock::now();
  for (int copy = 0; copy < copies; ++copy) to.copy_(from, true);
  stream.synchronize();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() /
         copies;
}

}  // namespace

bool drain(const Lane& lane) {
  // It shows by a further copy: a stream may report a failure until it gets more to do,
  // and what it reports instead of waiting does not tell that it is idle.
  for (int probe = 0; probe < kMaxProbes; ++probe) {
    try {
      const c10::StreamGuard current(lane.stream);
      constexpr bool kNonBlocking = true;
      c10::Event behind(lane.stream.device_type());
      lane.probe_to.copy_(lane.probe_from, kNonBlocking);
      behind.record(lane.stream);
      wait_or_ask(behind);
      return true;
    } catch (std::exception& failure) {
      // The old failure, or another one.
      take_from_python(failure);
    }
  }
  return false;
}

void run(const Plan& plan, const Resources& with) {
  check_resources(plan, with);
  if (plan.tiles.empty()) return;
  Pipeline pipeline(plan, with);
  if (!with.lane) {
    pipeline.run();
  } else {
    run_on(*with.lane, plan.layers.front().device(), [&] { pipeline.run(); });
  }
}

std::pair<double, double> copy_times(const Plan& plan, const Resources& with) {
  check_resources(plan, with);
  if (!with.lane || !with.collector.defined() || plan.tiles.empty()) {
    refuse("a lane, staging and a collector to measure copies with");
  }
  const int64_t size = std::min(kProbeBytes, plan.row_bytes) / plan.element_size();
  const at::Tensor from = view(plan.layers.front(), 0, size);
  const at::Tensor host = divide(plan, with).memory.front().narrow(0, 0, size);
  const at::Tensor inside = with.collector.narrow(0, 0, size);
  std::pair<double, double> least{INFINITY, INFINITY};
  run_on(*with.lane, from.device(), [&] {
    for (int round = 0; round < kRounds; ++round) {
      const int copies = round == 0 ? kFirstProbes : kProbes;
      const double across = time_of(host, from, copies, with.lane->stream);
      const double within = time_of(inside, from, copies, with.lane->stream);
      // Others can only make a copy slower.
      least = {std::min(least.first, across), std::min(least.second, within)};
      if (across + within > kHopelessUs) break;
    }
  });
  return least;
}

}  // namespace kv_transpose
