// SPDX-License-Identifier: Apache-2.0
//
// A whole transfer between device tensors and token-major chunks: while one part of
// host staging is transposed, the copies of the next ones are in flight. Any device
// that torch has streams and events for can use it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
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
  std::vector<at::Tensor> chunks;  // as `windows` has them; copied to in place
  std::vector<Chunk> windows;
  int64_t heads = 0;      // of every chunk
  int64_t row_bytes = 0;  // of one head of one token
  std::vector<Piece> pieces;
  bool in_place = false;  // the device copies to and from the chunks, without staging
  std::optional<c10::Stream> stream;  // of the copies; without one they are synchronous
  at::Tensor probe_to, probe_from;    // with a stream: pinned and device memory, alike
  int threads = 1;                    // that transpose at most, the caller included
};

/// A transfer failed, and the device can't be asked whether its copies have ended: they
/// may still use its memory.
class NotDrained : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Moves every piece of every layer: chunk by chunk, then layer by layer. Returns when
/// the last copy is complete. With a collector a batch crosses to or from the host as
/// one copy; on one stream, whose order keeps its reuse safe.
///
/// Copies are issued on `stream`, behind what the caller's current stream of the device
/// has been given. No other thread may use it meanwhile. Failures are those of
/// its own copies, and of what they had to wait for.
///
/// Throws std::invalid_argument before the first copy unless every piece lies inside of
/// its layer's memory, of every part and of its chunk. If a copy fails, that is thrown
/// when no copy is in flight and the stream has no more failures to report; NotDrained
/// where that can't be brought about.
void run(const Transfer& transfer);

}  // namespace kv_transpose
