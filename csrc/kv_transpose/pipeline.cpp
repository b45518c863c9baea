// SPDX-License-Identifier: Apache-2.0
#include "pipeline.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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
  if (transfer.layers.empty() || transfer.parts.empty()) {
    refuse("at least one layer and one part of staging");
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
  const Piece* const end = transfer.pieces + transfer.num_pieces;
  const auto regions = static_cast<size_t>(transfer.num_pieces * layers);
  plan.tiles.reserve(regions);
  plan.starts.reserve(regions);
  for (const Piece* piece = transfer.pieces; piece != end;) {
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

/// One transfer under way.
class Pipeline {
 public:
  Pipeline(const Transfer& transfer, const Plan& plan, Job job)
      : transfer_(transfer), plan_(plan), job_(std::move(job)) {
    const c10::Device device = transfer.layers.front().device();
    if (transfer.non_blocking) {
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    }
    for (const at::Tensor& memory : transfer.parts) {
      parts_.push_back({memory, std::nullopt});
      if (stream_) parts_.back().copied.emplace(device.type());
    }
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

 private:
  /// A part of staging, and the event behind its copies.
  struct Part {
    at::Tensor memory;
    std::optional<c10::Event> copied;
  };

  bool to_host() const { return transfer_.direction == Direction::kGather; }
  Part& part_of(size_t batch) { return parts_[batch % parts_.size()]; }
  size_t begin_of(size_t batch) const { return batch == 0 ? 0 : plan_.ends[batch - 1]; }

  /// Waits for the copies of a batch. Its part is free then.
  void finish(size_t batch) {
    if (stream_) wait_for(*part_of(batch).copied);
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
    std::vector<at::Tensor> regions;
    std::vector<at::Tensor> windows;
    int64_t used = 0;
    {
      // Nobody but the copies sees these views.
      const at::AutoDispatchBelowADInplaceOrView plain;
      for (size_t index = begin_of(batch); index < plan_.ends[batch]; ++index) {
        const Tile& tile = plan_.tiles[index];
        const int64_t size = bytes_of(tile, job_.row_bytes) / element;
        const at::Tensor& layer = transfer_.layers[static_cast<size_t>(tile.layer)];
        regions.push_back(view(layer, plan_.starts[index], size));
        windows.push_back(view(staged, tile.staged / element, size));
        used += size;
      }
    }
    const auto& targets = to_host() ? windows : regions;
    const auto& sources = to_host() ? regions : windows;
    if (!collects) {
      at::_foreach_copy_(targets, sources, transfer_.non_blocking);
    } else {
      const at::Tensor across = part.memory.narrow(0, 0, used);
      const at::Tensor collected = staged.narrow(0, 0, used);
      if (!to_host()) collected.copy_(across, transfer_.non_blocking);
      // Not as a batch, which some devices make a synchronous copy.
      for (size_t index = 0; index < targets.size(); ++index) {
        targets[index].copy_(sources[index], transfer_.non_blocking);
      }
      if (to_host()) across.copy_(collected, transfer_.non_blocking);
    }
    if (stream_) part.copied->record(*stream_);
  }

  const Transfer& transfer_;
  const Plan& plan_;
  Job job_;
  std::optional<c10::Stream> stream_;
  std::vector<Part> parts_;
};

}  // namespace

void run(const Transfer& transfer) {
  check_tensors(transfer);
  Plan plan = expand(transfer);
  Job job;
  job.direction = transfer.direction;
  job.staging_bytes = room_of_part(transfer);
  job.chunks = transfer.chunks;
  job.heads = transfer.heads;
  job.row_bytes = transfer.row_bytes;
  job.tiles = plan.tiles.data();
  job.num_tiles = static_cast<int64_t>(plan.tiles.size());
  // Of every region by itself, before they are packed.
  check(job);
  check_regions(transfer, plan);
  pack(transfer, plan);
  Pipeline(transfer, plan, std::move(job)).run();
}

}  // namespace kv_transpose
