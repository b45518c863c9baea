// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <utility>

namespace kv_transpose {
namespace {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(c10::str(parts...));
}

/// As Python calls it.
std::string name_of(at::ScalarType type) {
  return c10::str("torch.", c10::getDtypeNames(type).first);
}

bool alike(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides() &&
         one.scalar_type() == other.scalar_type() && one.device() == other.device();
}

std::string describe(const at::Tensor& tensor) {
  return c10::str("(", tensor.sizes(), ", ", tensor.strides(), ", ",
                  name_of(tensor.scalar_type()), ", ", tensor.device(), ")");
}

/// Elements from the first one of a layer to behind its last; -1 if that is no number.
int64_t extent_of(const Geometry& of) {
  int64_t extent = 1;
  for (const int64_t size : {of.heads, of.slots, of.head_size}) {
    if (size < 1 || __builtin_mul_overflow(extent, size, &extent)) return -1;
  }
  const std::pair<int64_t, int64_t> outer[] = {{of.blocks, of.block_stride},
                                               {of.planes, of.plane_stride}};
  for (const auto& [size, stride] : outer) {
    int64_t last = 0;
    if (size < 1 || stride < 0 || __builtin_mul_overflow(size - 1, stride, &last) ||
        __builtin_add_overflow(extent, last, &extent)) {
      return -1;
    }
  }
  return extent;
}

void check_layers(const Plan& plan, const Geometry& geometry) {
  if (plan.layers.empty()) refuse("wanted at least one KV layer, got none");
  const at::Tensor& first = plan.layers.front();
  const int64_t extent = extent_of(geometry);
  for (size_t index = 0; index < plan.layers.size(); ++index) {
    const at::Tensor& layer = plan.layers[index];
    if (!alike(layer, first)) {
      refuse(
          "the KV layers of one transfer must agree in shape, strides, dtype and "
          "device; layer 0 is ",
          describe(first), ", layer ", index, " is ", describe(layer),
          ". Models with several kinds of KV cache (hybrid, sliding window) are not "
          "supported");
    }
    const int64_t room =
        layer.has_storage()
            ? static_cast<int64_t>(layer.storage().nbytes()) / layer.element_size() -
                  layer.storage_offset()
            : 0;
    if (extent < 1 || extent > room) {
      refuse("KV layer ", index, " has the memory of ", room, " elements, wanted ",
             extent, " of ", geometry.blocks, " blocks");
    }
  }
}

/// Refuses a tensor without the memory that its shape and strides speak of.
void check_memory(const at::Tensor& tensor, size_t index) {
  const bool plain = tensor.has_storage() && !tensor.is_neg() && !tensor.is_conj();
  const size_t got = plain ? tensor.storage().nbytes() : 0;
  const size_t wanted = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(),
      static_cast<size_t>(tensor.storage_offset()));
  if (!plain || wanted > got) {
    refuse("chunk ", index, " wants the memory that its shape needs, ", wanted,
           " bytes, got ", got, "; pass a plain tensor whose storage was not resized");
  }
}

void check_type(const Plan& plan, const at::Tensor& chunk, size_t index) {
  const at::ScalarType type = plan.layers.front().scalar_type();
  if (chunk.scalar_type() != type) {
    refuse("chunk ", index, " is ", name_of(chunk.scalar_type()),
           " but the KV cache is ", name_of(type),
           "; a chunk is stored and restored in the KV cache's dtype");
  }
}

/// Bytes between the items of an axis; those of a single one may be anything.
int64_t byte_stride(const at::Tensor& tensor, int64_t axis) {
  return tensor.size(axis) == 1 ? 0 : tensor.stride(axis) * tensor.element_size();
}

Chunk host_window(const Plan& plan, const Geometry& geometry, size_t index,
                  int64_t chunk_tokens) {
  const at::Tensor& chunk = plan.chunks[index];
  const bool last = index + 1 == plan.chunks.size();
  const int64_t tokens = chunk.dim() >= 2 ? chunk.size(-2) : 0;
  const bool fits =
      0 < tokens && (last ? tokens <= chunk_tokens : tokens == chunk_tokens);
  std::vector<int64_t> wanted = {static_cast<int64_t>(plan.layers.size()),
                                 fits ? tokens : chunk_tokens,
                                 geometry.heads * geometry.head_size};
  if (geometry.planes > 1) wanted.insert(wanted.begin(), geometry.planes);
  if (chunk.sizes() != wanted) {
    refuse("chunk ", index, " has shape ", chunk.sizes(), ", wanted ",
           at::IntArrayRef(wanted), last ? " or fewer tokens" : "",
           " for this KV cache");
  }
  check_type(plan, chunk, index);
  if (!chunk.device().is_cpu()) {
    refuse("chunk ", index, " is on ", chunk.device(), ", wanted host memory (cpu)");
  }
  if (chunk.stride(-1) != 1 && chunk.size(-1) > 1) {
    refuse("chunk ", index, " has strides ", chunk.strides(),
           "; the last axis must be dense");
  }
  check_memory(chunk, index);
  return {static_cast<char*>(chunk.data_ptr()),
          geometry.planes,
          wanted.end()[-3],
          tokens,
          geometry.planes > 1 ? byte_stride(chunk, 0) : 0,
          byte_stride(chunk, -3),
          byte_stride(chunk, -2)};
}

/// Refuses a chunk whose elements overlap.
void check_strides(const at::Tensor& chunk, size_t index) {
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (int64_t axis = 0; axis < chunk.dim(); ++axis) {
    if (chunk.size(axis) > 1) axes.push_back({chunk.stride(axis), chunk.size(axis)});
  }
  std::sort(axes.begin(), axes.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : axes) {
    if (stride < extent) {
      refuse("chunk ", index, " has strides ", chunk.strides(), " for shape ",
             chunk.sizes(),
             ", so its elements overlap; gather into a chunk with memory of its own "
             "for each");
    }
    extent += stride * (size - 1);
  }
}

/// Refuses chunks that a gather would write to more than once. Windows of one buffer
/// may interleave, so where extents meet all rows are compared.
void check_apart(const Plan& plan) {
  struct Extent {
    const char* begin;
    const char* end;
    size_t chunk;
  };
  std::vector<Extent> extents;
  const auto meeting = [&extents] {
    std::sort(extents.begin(), extents.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    return std::adjacent_find(
        extents.begin(), extents.end(),
        [](const Extent& a, const Extent& b) { return a.end > b.begin; });
  };
  for (size_t index = 0; index < plan.windows.size(); ++index) {
    const at::Tensor& chunk = plan.chunks[index];
    check_strides(chunk, index);
    const char* const first = plan.windows[index].data;
    extents.push_back({first,
                       first + at::detail::computeStorageNbytes(
                                   chunk.sizes(), chunk.strides(), chunk.itemsize()),
                       index});
  }
  if (meeting() == extents.end()) return;
  extents.clear();
  for (size_t index = 0; index < plan.windows.size(); ++index) {
    const Chunk& chunk = plan.windows[index];
    for (int64_t row = 0; row < chunk.planes * chunk.layers * chunk.tokens; ++row) {
      const int64_t of_plane = chunk.layers * chunk.tokens;
      const char* const first =
          chunk.data + chunk.offset(row / of_plane, row % of_plane / chunk.tokens,
                                    row % chunk.tokens);
      extents.push_back({first, first + plan.heads * plan.row_bytes, index});
    }
  }
  const auto found = meeting();
  if (found == extents.end()) return;
  const auto [first, second] = std::minmax(found[0].chunk, found[1].chunk);
  refuse("chunks ", first, " and ", second,
         " are the same memory, in whole or in part; pass a chunk of its own for each "
         "to gather into");
}

void check_blocks(const Plan& plan, const Geometry& geometry,
                  const std::vector<ChunkBlocks>& blocks) {
  std::vector<int64_t> written, twice;
  for (const ChunkBlocks& of : blocks) {
    for (const int64_t id : of.ids) {
      if (id < 0 || id >= geometry.blocks) {
        refuse("block id ", id, " is outside of the KV cache, which has blocks 0 to ",
               geometry.blocks - 1);
      }
    }
    written.insert(written.end(), of.ids.begin() + of.skip, of.ids.end());
  }
  if (plan.direction == Direction::kGather) return;
  std::sort(written.begin(), written.end());
  for (size_t index = 1; index < written.size(); ++index) {
    const int64_t id = written[index];
    if (id == written[index - 1] && (twice.empty() || twice.back() != id)) {
      twice.push_back(id);
    }
  }
  if (!twice.empty()) {
    refuse("blocks ", at::IntArrayRef(twice),
           " are destinations of more than one block of tokens; each block can be "
           "restored once per call");
  }
}

/// Cuts the blocks of one chunk into segments of one layer.
class Cutter {
 public:
  Cutter(const Geometry& of, int64_t max_elements) : of_(of), max_(max_elements) {}

  void cut(int64_t chunk, const ChunkBlocks& blocks) {
    chunk_ = chunk;
    const auto count = static_cast<int64_t>(blocks.ids.size());
    const int64_t whole = std::min(count, blocks.tokens / of_.slots);
    cut_whole(blocks.ids, blocks.skip, whole);
    // The slots of a block in part are contiguous within one head only.
    for (int64_t at = std::max(blocks.skip, whole); at < count; ++at) {
      cut_slots(blocks.ids, at, 0, of_.planes, blocks.tokens - at * of_.slots);
    }
  }

  std::vector<Tile> tiles;  // of layer 0
  std::vector<int64_t> starts;

 private:
  void cut_whole(const std::vector<int64_t>& ids, int64_t at, int64_t end) {
    const int64_t head = of_.slots * of_.head_size;
    const int64_t head_block = of_.heads * head;
    int64_t planes = of_.planes;
    if (planes > 1 && (of_.plane_stride != head_block || planes > max_ / head_block)) {
      planes = 1;
    }
    const int64_t heads = std::clamp<int64_t>(max_ / head, 1, of_.heads);
    int64_t most = 1;
    if (heads == of_.heads && of_.block_stride == planes * head_block) {
      most = std::max<int64_t>(1, max_ / (planes * head_block));
    }
    for (int64_t run = 1; at < end; at += run) {
      const int64_t* const id = ids.data() + at;
      for (run = 1; run < std::min(most, end - at) && id[run] == *id + run;) ++run;
      for (int64_t plane = 0; plane < of_.planes; plane += planes) {
        if (head > max_) {
          cut_slots(ids, at, plane, plane + 1, of_.slots);
          continue;
        }
        for (int64_t first = 0; first < of_.heads; first += heads) {
          add(*id, plane, 0,
              {0, chunk_, 0, plane, planes, at * of_.slots, run, of_.slots, first,
               std::min(heads, of_.heads - first)});
        }
      }
    }
  }

  /// The first slots of one block, head by head.
  void cut_slots(const std::vector<int64_t>& ids, int64_t at, int64_t plane,
                 int64_t end, int64_t slots) {
    const int64_t step = std::max<int64_t>(1, max_ / of_.head_size);
    for (; plane < end; ++plane) {
      for (int64_t head = 0; head < of_.heads; ++head) {
        for (int64_t slot = 0; slot < slots; slot += step) {
          add(ids[static_cast<size_t>(at)], plane, slot,
              {0, chunk_, 0, plane, 1, at * of_.slots + slot, 1,
               std::min(step, slots - slot), head, 1});
        }
      }
    }
  }

  void add(int64_t block, int64_t plane, int64_t slot, const Tile& tile) {
    tiles.push_back(tile);
    starts.push_back(block * of_.block_stride + plane * of_.plane_stride +
                     (tile.head * of_.slots + slot) * of_.head_size);
  }

  const Geometry of_;
  const int64_t max_;
  int64_t chunk_ = 0;
};

/// Cuts the blocks of every chunk, and repeats that in each layer.
void add_segments(Plan& plan, const Geometry& geometry,
                  const std::vector<ChunkBlocks>& blocks, int64_t max_bytes) {
  const auto layers = static_cast<int64_t>(plan.layers.size());
  for (size_t chunk = 0; chunk < blocks.size(); ++chunk) {
    Cutter cutter(geometry, max_bytes / plan.element_size());
    cutter.cut(static_cast<int64_t>(chunk), blocks[chunk]);
    for (int64_t layer = 0; layer < layers; ++layer) {
      plan.starts.insert(plan.starts.end(), cutter.starts.begin(), cutter.starts.end());
      for (Tile tile : cutter.tiles) {
        tile.layer = layer;
        plan.tiles.push_back(tile);
        plan.bytes += tile.rows() * plan.row_bytes;
        plan.largest_bytes = std::max(plan.largest_bytes, tile.rows() * plan.row_bytes);
      }
    }
  }
}

Plan start(Direction direction, std::vector<at::Tensor> layers,
           const Geometry& geometry, std::vector<at::Tensor> chunks) {
  Plan plan;
  plan.direction = direction;
  plan.layers = std::move(layers);
  plan.chunks = std::move(chunks);
  check_layers(plan, geometry);
  plan.heads = geometry.heads;
  plan.row_bytes = geometry.head_size * plan.element_size();
  return plan;
}

}  // namespace

Memory Plan::current_memory() const {
  Memory memory;
  for (const auto* tensors : {&layers, &chunks}) {
    for (const at::Tensor& tensor : *tensors) {
      memory.emplace_back(tensor.storage().data(), tensor.storage().nbytes());
    }
  }
  return memory;
}

Plan plan_host(Direction direction, std::vector<at::Tensor> layers,
               const Geometry& geometry, std::vector<at::Tensor> chunks,
               const std::vector<int64_t>& ids, int64_t chunk_tokens, int64_t skip,
               int64_t max_bytes) {
  Plan plan = start(direction, std::move(layers), geometry, std::move(chunks));
  if (chunk_tokens < 1 || chunk_tokens % geometry.slots != 0 || skip < 0) {
    refuse("wanted whole blocks for each chunk, and 0 or more to skip");
  }
  if (plan.row_bytes > max_bytes) {
    refuse("head size ", geometry.head_size, " of ",
           name_of(plan.layers.front().scalar_type()),
           " does not fit a staging buffer of ", max_bytes, " bytes");
  }
  const int64_t per_chunk = chunk_tokens / geometry.slots;
  std::vector<ChunkBlocks> blocks;
  auto next = ids.begin();
  int64_t needed = 0;
  plan.in_place = geometry.planes * geometry.heads == 1;
  for (size_t index = 0; index < plan.chunks.size(); ++index) {
    const Chunk window = host_window(plan, geometry, index, chunk_tokens);
    const int64_t count = (window.tokens + geometry.slots - 1) / geometry.slots;
    needed += count;
    const auto end = next + std::min<int64_t>(count, ids.end() - next);
    blocks.push_back({{next, end}, std::min(skip, count), window.tokens});
    next = end;
    skip -= blocks.back().skip;
    plan.in_place = plan.in_place && plan.chunks[index].is_pinned() &&
                    (window.tokens == 1 || window.token_stride == plan.row_bytes);
    plan.windows.push_back(window);
  }
  if (static_cast<int64_t>(ids.size()) != needed) {
    refuse("got ", ids.size(), " block ids, wanted ", needed, " for ",
           plan.chunks.size(), " chunks of ", per_chunk,
           " blocks; pass the ids that cover the chunks' tokens, and a shorter last "
           "chunk if fewer are stored");
  }
  check_blocks(plan, geometry, blocks);
  if (direction == Direction::kGather) check_apart(plan);
  add_segments(plan, geometry, blocks, max_bytes);
  plan.memory = plan.current_memory();
  return plan;
}

Plan plan_device(Direction direction, std::vector<at::Tensor> layers,
                 const Geometry& geometry, std::vector<at::Tensor> chunks,
                 std::vector<ChunkBlocks> blocks) {
  Plan plan = start(direction, std::move(layers), geometry, std::move(chunks));
  plan.on_device = plan.in_place = true;
  if (blocks.size() != plan.chunks.size()) refuse("wanted the block ids of each chunk");
  const int64_t token = geometry.heads * plan.row_bytes;
  const int64_t head_block = token * geometry.slots;
  const auto num_layers = static_cast<int64_t>(plan.layers.size());
  for (size_t index = 0; index < blocks.size(); ++index) {
    const at::Tensor& chunk = plan.chunks[index];
    ChunkBlocks& of = blocks[index];
    const auto count = static_cast<int64_t>(of.ids.size());
    of.tokens = count * geometry.slots;
    if (of.skip < 0 || of.skip > count) {
      refuse("wanted 0 to ", count, " blocks to skip, got ", of.skip);
    }
    check_type(plan, chunk, index);
    check_memory(chunk, index);
    const int64_t wanted = num_layers * geometry.planes * count * head_block;
    if (chunk.device() != plan.layers.front().device() || chunk.dim() != 1 ||
        !chunk.is_contiguous() || static_cast<int64_t>(chunk.nbytes()) < wanted) {
      refuse("wanted chunk ", index, " on ", plan.layers.front().device(),
             " with one dense axis of ", wanted, " bytes, got ", chunk.nbytes(),
             " bytes on ", chunk.device());
    }
    // As in a layer: the blocks' planes together, or all blocks of a plane.
    const bool planes_inside = geometry.plane_stride <= geometry.block_stride;
    plan.windows.push_back({nullptr, geometry.planes, num_layers, of.tokens,
                            planes_inside ? head_block : count * head_block,
                            geometry.planes * count * head_block,
                            planes_inside ? geometry.planes * token : token});
  }
  check_blocks(plan, geometry, blocks);
  add_segments(plan, geometry, blocks, INT64_MAX);
  plan.memory = plan.current_memory();
  return plan;
}

}  // namespace kv_transpose
