// SPDX-License-Identifier: Apache-2.0
//
// A whole transfer between device tensors and token-major chunks: while one part of
// host staging is transposed, the copies of the next ones are in flight. Any device
// that torch has streams and events for can use it.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <vector>

#include "transpose.h"

namespace kv_transpose {

/// A region that is contiguous on the device, in every layer; a row of the table that
/// callers pass, hence eight bytes each and in order. In its chunk it is the window
/// [planes, blocks * slots tokens from `token` on, heads].
struct Piece {
  int64_t chunk;
  int64_t block;
  int64_t blocks;
  int64_t plane;
  int64_t planes;
  int64_t head;
  int64_t heads;
  int64_t slot;
  int64_t slots;  // of each block
  int64_t token;
};
constexpr int kPieceColumns = sizeof(Piece) / sizeof(int64_t);

struct Transfer {
  Direction direction = Direction::kGather;
  std::vector<at::Tensor> layers;       // of one element type, on one device
  std::array<int64_t, 4> strides = {};  // of a layer's blocks, planes, heads and slots
  std::vector<at::Tensor> parts;  // staging of that type in host memory, one dense axis
  at::Tensor collector;     // device memory as large as a part, if pieces are collected
  int64_t batch_bytes = 0;  // that are staged in a part, unless a piece is larger
  std::vector<Chunk> chunks;
  int64_t heads = 0;      // of every chunk
  int64_t row_bytes = 0;  // of one head of one token
  const Piece* pieces = nullptr;
  int64_t num_pieces = 0;
  bool non_blocking = false;  // streams and events exist, and staging is pinned
  int threads = 1;            // that transpose at most, the caller included
};

/// Moves every piece of every layer on the current stream of the layers' device:
/// chunk by chunk, then layer by layer. Returns when the last copy is complete. With a
/// collector a batch crosses to or from the host as one copy; on one stream, whose
/// order keeps its reuse safe.
///
/// Throws std::invalid_argument before the first copy unless every piece lies inside of
/// its layer's memory, of every part and of its chunk. If a copy fails, those before it
/// may be in flight.
void run(const Transfer& transfer);

}  // namespace kv_transpose
