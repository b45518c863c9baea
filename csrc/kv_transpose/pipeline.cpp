// SPDX-License-Identifier: Apache-2.0
#include "pipeline.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace kv_transpose {
namespace {

[[noreturn]] void refuse(const std::string& wanted) {
  throw std::invalid_argument("wanted " + wanted);
}

bool is_staging(const at::Tensor& tensor, const at::Tensor& layer) {
  return tensor.scalar_type() == layer.scalar_type() && tensor.dim() == 1 &&
         tensor.is_contiguous();
}

int64_t room_of_part(const Transfer& transfer) {
  int64_t room = INT64_MAX;
  for (const at::Tensor& part : transfer.parts) {
    room = std::min(room, static_cast<int64_t>(part.nbytes()));
  }
  return room;
}

void check_tensors(const Transfer& transfer) {
  if (transfer.layers.empty() || transfer.parts.empty() != transfer.in_place) {
    refuse("at least one layer, and either parts of staging or copies in place");
  }
  const at::Tensor& first = transfer.layers.front();
  for (const at::Tensor& layer : transfer.layers) {
    if (layer.scalar_type() != first.scalar_type() ||
        layer.device() != first.device()) {
      refuse("layers of one element type on one device");
    }
  }
  for (const at::Tensor& part : transfer.parts) {
    if (!is_staging(part, first) || !part.device().is_cpu()) {
      refuse("parts of the layers' element type in host memory, of one dense axis");
    }
  }
  const at::Tensor& collector = transfer.collector;
  if (collector.defined() &&
      (!is_staging(collector, first) || collector.device() != first.device() ||
       static_cast<int64_t>(collector.nbytes()) < room_of_part(transfer))) {
    refuse(
        "a collector of the layers' element type and device, of one dense axis and "
        "at least " +
        std::to_string(room_of_part(transfer)) + " bytes");
  }
}

/// Elements of a tensor's memory, from its first one on.
int64_t room_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  return bytes / tensor.element_size() - tensor.storage_offset();
}

/// Where a piece starts in each layer, in elements from the layer's first; -1 if that
/// is not a number.
int64_t start_of(const Piece& piece, const std::array<int64_t, 4>& strides) {
  const std::array<int64_t, 4> first = {piece.block, piece.plane, piece.head,
                                        piece.slot};
  int64_t start = 0;
  for (size_t axis = 0; axis < first.size(); ++axis) {
    int64_t offset = 0;
    if (first[axis] < 0 ||
        __builtin_mul_overflow(first[axis], strides[axis], &offset) ||
        __builtin_add_overflow(start, offset, &start)) {
      return -1;
    }
  }
  return start;
}

int64_t bytes_of(const Tile& tile, int64_t row_bytes) {
  return tile.blocks * tile.planes * tile.heads * tile.slots * row_bytes;
}

/// What is copied, in order. A region and the tile of its number are the same bytes.
struct Plan {
  std::vector<Tile> tiles;
  std::vector<int64_t> starts;  // elements from the first one of the tile's layer
  std::vector<size_t> ends;     // of each batch, the region behind its last
};

/// Repeats the pieces of each chunk in each layer.
Plan expand(const Transfer& transfer) {
  Plan plan;
  const auto layers = static_cast<int64_t>(transfer.layers.size());
  const Piece* const end = transfer.pieces.data() + transfer.pieces.size();
  const size_t regions = transfer.pieces.size() * transfer.layers.size();
  plan.tiles.reserve(regions);
  plan.starts.reserve(regions);
  for (const Piece* piece = transfer.pieces.data(); piece != end;) {
    const Piece* const first = piece;
    while (piece != end && piece->chunk == first->chunk) ++piece;
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (const Piece* in = first; in != piece; ++in) {
        plan.tiles.push_back({0, in->chunk, layer, in->plane, in->planes, in->token,
                              in->blocks, in->slots, in->head, in->heads});
        plan.starts.push_back(start_of(*in, transfer.strides));
      }
    }
  }
  return plan;
}

void check_regions(const Transfer& transfer, const Plan& plan) {
  const int64_t element = transfer.layers.front().element_size();
  for (size_t index = 0; index < plan.tiles.size(); ++index) {
    const Tile& tile = plan.tiles[index];
    const int64_t room = room_of(transfer.layers[static_cast<size_t>(tile.layer)]);
    const int64_t start = plan.starts[index];
    const int64_t size = bytes_of(tile, transfer.row_bytes) / element;
    if (start < 0 || start >= room || size > room - start) {
      refuse("region " + std::to_string(index) + " (start " + std::to_string(start) +
             ", size " + std::to_string(size) + ") inside of the " +
             std::to_string(room) + " elements of layer " + std::to_string(tile.layer));
    }
  }
}

/// Fills batch after batch without gaps; a region that is larger has one of its own.
void pack(const Transfer& transfer, Plan& plan) {
  const int64_t room = std::min(transfer.batch_bytes, room_of_part(transfer));
  int64_t used = 0;
  for (size_t index = 0; index < plan.tiles.size(); ++index) {
    Tile& tile = plan.tiles[index];
    const int64_t bytes = bytes_of(tile, transfer.row_bytes);
    if (used > 0 && bytes > room - used) {
      plan.ends.push_back(index);
      used = 0;
    }
    tile.staged = used;
    used += bytes;
  }
  if (used > 0) plan.ends.push_back(plan.tiles.size());
}

/// Views elements [first, first + size) of a tensor, counted from its first one.
at::Tensor view(const at::Tensor& tensor, int64_t first, int64_t size) {
  constexpr int64_t kDense = 1;
  return at::as_strided(tensor, {&size, 1}, {&kDense, 1},
                        tensor.storage_offset() + first);
}

/// A piece's window of its chunk, where that is contiguous.
at::Tensor window_of(const Transfer& transfer, const Tile& tile, int64_t size) {
  const auto index = static_cast<size_t>(tile.chunk);
  const Chunk& chunk = transfer.windows[index];
  const int64_t first =
      tile.layer * chunk.layer_stride + tile.token * chunk.token_stride;
  return view(transfer.chunks[index], first / transfer.chunks[index].element_size(),
              size);
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

/// Waits until nothing is in flight on the stream and it has no failure to report, so
/// that the next transfer is not told of this one's. Returns whether that is so.
///
/// It shows by a further copy: a stream may report a failure until it gets more to do,
/// and what it reports instead of waiting does not tell that it is idle.
bool drain(const Transfer& transfer) {
  const c10::Stream& stream = *transfer.stream;
  for (int probe = 0; probe < kMaxProbes; ++probe) {
    try {
      const c10::StreamGuard current(stream);
      constexpr bool kNonBlocking = true;
      c10::Event behind(stream.device_type());
      transfer.probe_to.copy_(transfer.probe_from, kNonBlocking);
      behind.record(stream);
      wait_or_ask(behind);
      return true;
    } catch (std::exception& failure) {
      // The old failure, or another one.
      take_from_python(failure);
    }
  }
  return false;
}

/// One transfer under way.
class Pipeline {
 public:
  Pipeline(const Transfer& transfer, const Plan& plan, Job job)
      : transfer_(transfer), plan_(plan), job_(std::move(job)) {
    for (const at::Tensor& memory : transfer.parts) parts_.push_back({memory, marks()});
  }

  void run() {
    const size_t batches = plan_.ends.size();
    for (size_t batch = 0; batch < batches; ++batch) {
      if (batch >= parts_.size()) finish(batch - parts_.size());
      if (!to_host()) transpose(batch);
      copy(batch);
    }
    size_t batch = batches > parts_.size() ? batches - parts_.size() : 0;
    for (; batch < batches; ++batch) finish(batch);
  }

  void run_in_place() {
    std::optional<Marks> copied = marks();
    std::vector<at::Tensor> regions, windows;
    {
      const at::AutoDispatchBelowADInplaceOrView plain;
      for (size_t index = 0; index < plan_.tiles.size(); ++index) {
        regions.push_back(region(index));
        windows.push_back(
            window_of(transfer_, plan_.tiles[index], regions.back().numel()));
      }
    }
    copy_all(windows, regions, copied);
    if (copied) copied->wait();
  }

 private:
  /// A part of staging, and what is behind its copies.
  struct Part {
    at::Tensor memory;
    std::optional<Marks> copied;
  };

  bool to_host() const { return transfer_.direction == Direction::kGather; }
  Part& part_of(size_t batch) { return parts_[batch % parts_.size()]; }
  size_t begin_of(size_t batch) const { return batch == 0 ? 0 : plan_.ends[batch - 1]; }

  std::optional<Marks> marks() const {
    if (!transfer_.stream) return std::nullopt;
    return Marks(*transfer_.stream);
  }

  at::Tensor region(size_t index) const {
    const Tile& tile = plan_.tiles[index];
    const at::Tensor& layer = transfer_.layers[static_cast<size_t>(tile.layer)];
    return view(layer, plan_.starts[index],
                bytes_of(tile, job_.row_bytes) / layer.element_size());
  }

  /// Waits for the copies of a batch. Its part is free then.
  void finish(size_t batch) {
    if (part_of(batch).copied) part_of(batch).copied->wait();
    if (to_host()) transpose(batch);
  }

  void transpose(size_t batch) {
    job_.staging = static_cast<char*>(part_of(batch).memory.data_ptr());
    job_.tiles = plan_.tiles.data() + begin_of(batch);
    job_.num_tiles = static_cast<int64_t>(plan_.ends[batch] - begin_of(batch));
    kv_transpose::run(job_, transfer_.threads);
  }

  /// Issues the copies of a batch.
  void copy(size_t batch) {
    Part& part = part_of(batch);
    const bool collects = transfer_.collector.defined();
    const at::Tensor& staged = collects ? transfer_.collector : part.memory;
    const int64_t element = staged.element_size();
    std::vector<at::Tensor> regions, windows;
    int64_t used = 0;
    {
      // Nobody but the copies sees these views.
      const at::AutoDispatchBelowADInplaceOrView plain;
      for (size_t index = begin_of(batch); index < plan_.ends[batch]; ++index) {
        regions.push_back(region(index));
        const int64_t size = regions.back().numel();
        windows.push_back(view(staged, plan_.tiles[index].staged / element, size));
        used += size;
      }
    }
    if (!collects) {
      copy_all(windows, regions, part.copied);
      return;
    }
    const std::vector<at::Tensor> across = {part.memory.narrow(0, 0, used)};
    const std::vector<at::Tensor> collected = {staged.narrow(0, 0, used)};
    if (!to_host()) copy_all(across, collected, part.copied);
    copy_all(windows, regions, part.copied);
    if (to_host()) copy_all(across, collected, part.copied);
  }

  /// Issues copies between windows, on the host or the device, and device regions.
  void copy_all(const std::vector<at::Tensor>& host,
                const std::vector<at::Tensor>& device, std::optional<Marks>& copied) {
    const auto& targets = to_host() ? host : device;
    const auto& sources = to_host() ? device : host;
    if (!copied) {
      at::_foreach_copy_(targets, sources);
      return;
    }
    constexpr bool kNonBlocking = true;
    for (size_t index = 0; index < targets.size(); ++index) {
      if (targets[index].device() == sources[index].device()) {
        // What is for batches some devices make a synchronous copy here.
        targets[index].copy_(sources[index], kNonBlocking);
      } else {
        at::_foreach_copy_({&targets[index], 1}, {&sources[index], 1}, kNonBlocking);
      }
      copied->add();
    }
  }

  const Transfer& transfer_;
  const Plan& plan_;
  Job job_;
  std::vector<Part> parts_;
};

/// Runs the pipeline on the stream of the transfer, behind the caller's current one.
void run_on_stream(Pipeline& pipeline, const Transfer& transfer) {
  const c10::Stream stream = *transfer.stream;
  const c10::Device device = transfer.layers.front().device();
  const c10::impl::VirtualGuardImpl of_device(device.type());
  const c10::Stream callers = of_device.getStream(device);
  if (stream.device() != device || stream == callers) {
    refuse("a stream of the layers' device, and not the caller's current one");
  }
  if (!transfer.probe_to.defined() || transfer.probe_from.device() != device ||
      transfer.probe_to.nbytes() != transfer.probe_from.nbytes()) {
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
    transfer.in_place ? pipeline.run_in_place() : pipeline.run();
    begun.wait();
  } catch (std::exception& failure) {
    take_from_python(failure);
    if (drain(transfer)) throw;
    throw NotDrained(failure.what());
  }
}

}  // namespace

void run(const Transfer& transfer) {
  check_tensors(transfer);
  Plan plan = expand(transfer);
  Job job;
  job.direction = transfer.direction;
  job.staging_bytes = transfer.in_place ? INT64_MAX : room_of_part(transfer);
  job.chunks = transfer.windows;
  job.heads = transfer.heads;
  job.row_bytes = transfer.row_bytes;
  job.tiles = plan.tiles.data();
  job.num_tiles = static_cast<int64_t>(plan.tiles.size());
  // Of every region by itself, before they are packed.
  check(job);
  check_regions(transfer, plan);
  if (!transfer.in_place) pack(transfer, plan);
  Pipeline pipeline(transfer, plan, std::move(job));
  if (transfer.stream) {
    run_on_stream(pipeline, transfer);
  } else {
    transfer.in_place ? pipeline.run_in_place() : pipeline.run();
  }
}

}  // namespace kv_transpose
