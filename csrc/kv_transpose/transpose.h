// SPDX-License-Identifier: Apache-2.0
//
// The head <-> token transposition between paged KV blocks, staged in host memory, and
// token-major chunks. Knows nothing of devices: whoever stages blocks on the host can
// use it.
//
// A tile is dense in staging memory, [blocks, planes, heads, slots, row], a row being
// the bytes of one head of one token. In its chunk it is the window
// [planes, blocks * slots tokens, heads, row] of one layer, of any strides whose rows
// are dense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv_transpose {

enum class Direction {
  kGather,   // staging -> chunk
  kScatter,  // chunk -> staging
};

/// A chunk in host memory, [planes, layers, tokens, heads, row]; strides are in bytes
/// and those of a head and of a byte are dense.
struct Chunk {
  char* data = nullptr;
  int64_t planes = 0;
  int64_t layers = 0;
  int64_t tokens = 0;
  int64_t plane_stride = 0;
  int64_t layer_stride = 0;
  int64_t token_stride = 0;

  int64_t offset(int64_t plane, int64_t layer, int64_t token) const {
    return plane * plane_stride + layer * layer_stride + token * token_stride;
  }
};

struct Tile {
  int64_t staged;  // offset in the staging buffer, bytes
  int64_t chunk;   // index of the chunk
  int64_t layer;
  int64_t plane;
  int64_t planes;
  int64_t token;
  int64_t blocks;
  int64_t slots;  // tokens of each block
  int64_t head;
  int64_t heads;

  int64_t rows() const { return blocks * planes * heads * slots; }
};

/// Every tile lies inside of the staging buffer and of its chunk.
struct Job {
  Direction direction = Direction::kGather;
  char* staging = nullptr;
  const Chunk* chunks = nullptr;
  int64_t row_bytes = 0;  // of one head of one token
  const Tile* tiles = nullptr;
  int64_t num_tiles = 0;
};

/// Moves every tile of a job, in the calling thread and up to `threads - 1`
/// helpers. Chunk memory that two tiles of a gather share, or staging memory that two
/// tiles of a scatter share, gets the bytes of either.
void run(const Job& job, int threads);

}  // namespace kv_transpose
