// SPDX-License-Identifier: Apache-2.0
//
// The Python module lmcache.kv_transpose. Arrays are numpy's, of bytes: the kernel
// moves elements of any type without looking at them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "pybind_pipeline.h"
#include "transpose.h"

namespace py = pybind11;
namespace kv = kv_transpose;

namespace {

using Bytes = py::array_t<uint8_t, 0>;

char* address(const py::array& array) {
  return static_cast<char*>(const_cast<void*>(array.data()));
}

void require(bool holds, const std::string& wanted) {
  if (!holds) throw py::value_error("wanted " + wanted);
}

void require_writable(const py::array& array, const std::string& what) {
  require(array.writeable(), what + " to be writable");
}

/// Checks a [planes, layers, tokens, width] array of bytes.
kv::Chunk as_chunk(const py::handle& item, int64_t index, int64_t width) {
  const std::string name = "chunk " + std::to_string(index);
  require(py::isinstance<Bytes>(item), name + " as a numpy array of uint8");
  const auto array = py::reinterpret_borrow<py::array>(item);
  require(array.ndim() == 4 && array.shape(3) == width,
          name + " of shape [planes, layers, tokens, " + std::to_string(width) + "]");
  require(array.strides(3) == 1 || width == 1, name + " with a dense last axis");
  return {address(array),   array.shape(0),   array.shape(1),  array.shape(2),
          array.strides(0), array.strides(1), array.strides(2)};
}

void transpose(kv::Direction direction, const py::handle& staging,
               const py::sequence& chunks, int64_t row_bytes, const py::handle& tiles,
               int threads) {
  kv::Job job;
  job.direction = direction;
  require(threads >= 1, "threads of at least 1, got " + std::to_string(threads));
  require(row_bytes >= 1, "row_bytes of at least 1, got " + std::to_string(row_bytes));
  job.row_bytes = row_bytes;

  require(py::isinstance<Bytes>(staging), "staging as a numpy array of uint8");
  const auto buffer = py::reinterpret_borrow<py::array>(staging);
  require(buffer.ndim() == 1 && (buffer.strides(0) == 1 || buffer.size() < 2),
          "staging as a dense array of one axis");
  job.staging = address(buffer);
  job.staging_bytes = buffer.size();

  using Table = py::array_t<int64_t, py::array::c_style>;
  require(py::isinstance<Table>(tiles), "tiles as a dense numpy array of int64");
  const auto table = py::reinterpret_borrow<py::array>(tiles);
  require(table.ndim() == 2 && table.shape(1) == kv::kTileColumns,
          "tiles of shape [n, " + std::to_string(kv::kTileColumns) + "]");
  job.tiles = static_cast<const kv::Tile*>(table.data());
  job.num_tiles = table.shape(0);

  int64_t width = 0;
  for (const py::handle& item : chunks) {
    const auto index = static_cast<int64_t>(job.chunks.size());
    if (index == 0 && py::isinstance<Bytes>(item)) {
      const auto first = py::reinterpret_borrow<py::array>(item);
      width = first.ndim() == 4 ? first.shape(3) : 0;
      require(width % row_bytes == 0 && width > 0,
              "chunk 0 of shape [planes, layers, tokens, heads * " +
                  std::to_string(row_bytes) + "]");
    }
    job.chunks.push_back(as_chunk(item, index, width));
    if (direction == kv::Direction::kGather) {
      require_writable(py::reinterpret_borrow<py::array>(item),
                       "chunk " + std::to_string(index));
    }
  }
  job.heads = width / row_bytes;
  if (direction == kv::Direction::kScatter) require_writable(buffer, "staging");

  const py::gil_scoped_release released;
  kv::check(job);
  kv::run(job, threads);
}

}  // namespace

PYBIND11_MODULE(kv_transpose, module) {
  module.doc() = "Transposition between staged head-major tiles and token-major chunks";
  // Another one with every change of a function's arguments.
  module.attr("INTERFACE") = 2;
  module.attr("TILE_COLUMNS") =
      py::make_tuple("staged", "chunk", "layer", "plane", "planes", "token", "blocks",
                     "slots", "head", "heads");
  const auto define = [&](const char* name, kv::Direction direction, const char* doc) {
    module.def(
        name,
        [direction](const py::object& staging, const py::sequence& chunks,
                    int64_t row_bytes, const py::object& tiles, int threads) {
          transpose(direction, staging, chunks, row_bytes, tiles, threads);
        },
        py::arg("staging"), py::arg("chunks"), py::arg("row_bytes"), py::arg("tiles"),
        py::arg("threads") = 1, doc);
  };
  define("gather", kv::Direction::kGather,
         R"(Copy tiles from a staging buffer into token-major chunks.

Tiles are dense in staging, [blocks, planes, heads, slots, row_bytes]. The GIL is
released meanwhile. Chunks are written past the cache where the machine can.

Args:
    staging: uint8, one dense axis.
    chunks: uint8 arrays [planes, layers, tokens, heads * row_bytes] with a dense last
        axis, all of the same width.
    row_bytes: Bytes of one head of one token.
    tiles: int64, dense, [n, 10]; its columns are TILE_COLUMNS. `staged` is an offset in
        bytes.
    threads: Threads that take part at most, the caller included.

Raises:
    ValueError: An array is not as above, or a tile does not lie inside them. No byte
        has moved then.)");
  define("scatter", kv::Direction::kScatter,
         R"(Copy tiles from token-major chunks into a staging buffer.

The mirror of gather, with the same arguments.)");
  define_transfer(module);
}
