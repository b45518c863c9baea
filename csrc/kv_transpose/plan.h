// SPDX-License-Identifier: Apache-2.0
//
// What a transfer copies: from block ids and geometry to segments.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "transpose.h"

namespace kv_transpose {

/// Every layer's blocks, [blocks, planes, heads, slots, head size]. The last three axes
/// are dense; strides are in elements.
struct Geometry {
  int64_t blocks, planes, heads, slots, head_size;
  int64_t block_stride, plane_stride;
};

/// The blocks of one chunk, in token order. The first `skip` are left alone, and the
/// last one may be filled in part.
struct ChunkBlocks {
  std::vector<int64_t> ids;
  int64_t skip = 0;
  int64_t tokens = 0;
};

/// Where a storage begins, and its bytes.
using Memory = std::vector<std::pair<const void*, size_t>>;

/// A checked transfer: no segment leaves the memory of its layer and of its chunk. It
/// owns its tensors, so nobody else can take or change what they are.
struct Plan {
  Direction direction = Direction::kGather;
  std::vector<at::Tensor> layers;  // alike
  std::vector<at::Tensor> chunks;
  std::vector<Chunk> windows;  // the chunks
  Memory memory;               // that was checked
  int64_t heads = 0;           // of each token
  int64_t row_bytes = 0;       // of one head of one token
  // A segment is contiguous on the device: `starts` has its first element in its layer,
  // and `tiles` its chunk's part. Chunk by chunk, and in each layer by layer.
  std::vector<Tile> tiles;
  std::vector<int64_t> starts;
  int64_t bytes = 0;          // of all segments
  int64_t largest_bytes = 0;  // of one
  bool on_device = false;     // whether the chunks are
  bool in_place = false;      // whether segments are contiguous in their chunks too

  /// What the tensors have now: a storage may be resized at any time.
  Memory current_memory() const;
  int64_t element_size() const { return layers.front().element_size(); }
};

/// Plans a transfer between layers and token-major chunks in host memory,
/// [planes, layers, tokens, heads * head size], or without planes where there is one.
/// Segments are as large as the layout and `max_bytes` allow: neighbouring blocks join,
/// and a block that is too large is cut by plane, then heads, then slots.
///
/// Throws std::invalid_argument unless layers are alike and have the geometry's memory;
/// chunks are of their type, of `chunk_tokens` tokens (the last one of fewer, perhaps)
/// and share no byte if they are written; and `ids` are blocks that cover their tokens,
/// none of them twice behind the first `skip` if they are written.
Plan plan_host(Direction direction, std::vector<at::Tensor> layers,
               const Geometry& geometry, std::vector<at::Tensor> chunks,
               const std::vector<int64_t>& ids, int64_t chunk_tokens, int64_t skip,
               int64_t max_bytes);

/// Plans copies between layers and chunks on the same device: dense, of the layers'
/// type and with whole blocks as they lie in a layer, layer by layer. Checks the same.
Plan plan_device(Direction direction, std::vector<at::Tensor> layers,
                 const Geometry& geometry, std::vector<at::Tensor> chunks,
                 std::vector<ChunkBlocks> blocks);

}  // namespace kv_transpose
