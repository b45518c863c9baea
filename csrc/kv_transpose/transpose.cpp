// SPDX-License-Identifier: Apache-2.0
#include "transpose.h"

#include <algorithm>

#include "rows.h"
#include "workers.h"

namespace kv_transpose {
namespace {

/// A part of a tile: some slots of one block and plane, all of its heads.
struct Span {
  const Tile* tile;
  int64_t block;
  int64_t plane;
  int64_t slot;
  int64_t slots;
};

/// What one thread takes at a time: enough to be worth it, little enough to share.
constexpr int64_t kSpanBytes = 128 << 10;

/// Where a span lies on both sides.
struct Place {
  char* staged;  // of its first head and slot; heads lie head_stride apart
  int64_t head_stride;
  char* window;  // of its first token and head; tokens lie token_stride apart
  int64_t token_stride;
};

Place place(const Job& job, const Span& span) {
  const Tile& tile = *span.tile;
  const Chunk& chunk = job.chunks[tile.chunk];
  const int64_t head_stride = tile.slots * job.row_bytes;
  const int64_t head_block = span.block * tile.planes + span.plane;
  const int64_t token = tile.token + span.block * tile.slots + span.slot;
  return {job.staging + tile.staged + head_block * tile.heads * head_stride +
              span.slot * job.row_bytes,
          head_stride,
          chunk.data + chunk.offset(tile.plane + span.plane, tile.layer, token) +
              tile.head * job.row_bytes,
          chunk.token_stride};
}

template <typename CopyRow>
void gather(const Place& at, int64_t tokens, int64_t heads, int64_t row,
            CopyRow&& copy) {
  for (int64_t token = 0; token < tokens; ++token) {
    char* to = at.window + token * at.token_stride;
    const char* from = at.staged + token * row;
    for (int64_t head = 0; head < heads; ++head) {
      copy(to + head * row, from + head * at.head_stride, row);
    }
  }
}

void scatter(const Place& at, int64_t tokens, int64_t heads, int64_t row) {
  for (int64_t token = 0; token < tokens; ++token) {
    const char* from = at.window + token * at.token_stride;
    char* to = at.staged + token * row;
    for (int64_t head = 0; head < heads; ++head) {
      if (row <= kAheadBytes) fetch_ahead(from + head * row, row);
      copy_row(to + head * at.head_stride, from + head * row, row);
    }
  }
}

bool streamable(const Place& at, int64_t row) {
  const auto address = reinterpret_cast<uintptr_t>(at.window);
  return kStreams && address % kStreamAlignment == 0 && row % kStreamAlignment == 0 &&
         at.token_stride % kStreamAlignment == 0;
}

void move(const Job& job, const Span& span) {
  const Place at = place(job, span);
  int64_t tokens = span.slots;
  int64_t row = job.row_bytes;
  // Without other heads between them, the rows are one on both sides.
  if (span.tile->heads == 1 && at.token_stride == row) {
    row *= tokens;
    tokens = 1;
  }
  const int64_t heads = span.tile->heads;
  if (job.direction == Direction::kScatter) {
    scatter(at, tokens, heads, row);
  } else if (streamable(at, row)) {
    gather(at, tokens, heads, row, stream_row);
    end_stream();
  } else {
    gather(at, tokens, heads, row, copy_row);
  }
}

std::vector<Span> split(const Job& job) {
  std::vector<Span> spans;
  for (const Tile* tile = job.tiles; tile != job.tiles + job.num_tiles; ++tile) {
    const int64_t token_bytes = tile->heads * job.row_bytes;
    const int64_t step = std::max<int64_t>(1, kSpanBytes / token_bytes);
    for (int64_t block = 0; block < tile->blocks; ++block) {
      for (int64_t plane = 0; plane < tile->planes; ++plane) {
        for (int64_t slot = 0; slot < tile->slots; slot += step) {
          spans.push_back(
              {tile, block, plane, slot, std::min(step, tile->slots - slot)});
        }
      }
    }
  }
  return spans;
}

}  // namespace

void run(const Job& job, int threads) {
  const std::vector<Span> spans = split(job);
  share(spans.size(), threads, [&](size_t index) { move(job, spans[index]); });
}

}  // namespace kv_transpose
