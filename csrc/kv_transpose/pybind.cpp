// SPDX-License-Identifier: Apache-2.0
//
// The Python module lmcache.kv_transpose.
#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/numpy.h>
#include <torch/extension.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline.h"
#include "workers.h"

namespace py = pybind11;
namespace kv = kv_transpose;

namespace {

using Tensors = std::vector<at::Tensor>;
using Table = py::array_t<int64_t, py::array::c_style>;

void require(bool holds, const std::string& wanted) {
  if (!holds) throw py::value_error("wanted " + wanted);
}

size_t needed_bytes(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                          tensor.itemsize(),
                                          static_cast<size_t>(tensor.storage_offset()));
}

/// Refuses a host tensor without the memory that its shape and strides speak of.
void require_memory(const at::Tensor& tensor, const std::string& name) {
  require(tensor.has_storage() && !tensor.is_neg() && !tensor.is_conj(),
          name + " as a plain tensor in host memory");
  const size_t needed = needed_bytes(tensor), got = tensor.storage().nbytes();
  require(tensor.storage().data() != nullptr && needed <= got,
          name + " with the memory that its shape needs, " + std::to_string(needed) +
              " bytes, got " + std::to_string(got) +
              "; pass a tensor whose storage was not resized");
}

/// Bytes between the items of an axis; those of a single one may be anything.
int64_t byte_stride(const at::Tensor& tensor, int64_t axis) {
  return tensor.size(axis) == 1 ? 0 : tensor.stride(axis) * tensor.element_size();
}

/// A chunk [planes, layers, tokens, heads * head size], or one without planes, in host
/// memory; copied to and from in place it may be on a device too.
kv::Chunk as_chunk(const at::Tensor& chunk, size_t index, const at::Tensor& first,
                   at::Device in_place_on) {
  require((chunk.device().is_cpu() || chunk.device() == in_place_on) &&
              (chunk.dim() == 3 || chunk.dim() == 4),
          "chunks [planes, layers, tokens, heads * head size], or without planes, in "
          "host memory or, copied to in place, on the layers' device");
  require(chunk.dim() == first.dim() && chunk.size(-1) == first.size(-1) &&
              chunk.scalar_type() == first.scalar_type(),
          "chunks of the same axes and heads, and of the layers' element type");
  require(chunk.stride(-1) == 1 || chunk.size(-1) == 1, "chunks with dense tokens");
  require_memory(chunk, "chunk " + std::to_string(index));
  const bool has_planes = chunk.dim() == 4;
  return {static_cast<char*>(chunk.data_ptr()),
          has_planes ? chunk.size(0) : 1,
          chunk.size(-3),
          chunk.size(-2),
          has_planes ? byte_stride(chunk, 0) : 0,
          byte_stride(chunk, -3),
          byte_stride(chunk, -2)};
}

/// The first parts of each buffer.
Tensors divide(const Tensors& buffers, int64_t part_bytes, int64_t parts,
               const at::Tensor& layer) {
  const int64_t element = layer.element_size();
  require(parts >= 1 && part_bytes >= 1 && part_bytes % element == 0,
          "at least one part of whole elements");
  Tensors divided;
  for (const at::Tensor& buffer : buffers) {
    require(buffer.scalar_type() == at::kByte && buffer.dim() == 1 &&
                buffer.is_contiguous() && buffer.device().is_cpu() &&
                buffer.storage_offset() % element == 0 &&
                buffer.size(0) / part_bytes >= parts,
            "staging as uint8 in host memory, of one dense axis, with room for its "
            "parts and aligned to elements");
    require_memory(buffer, "staging");
    const at::Tensor used = buffer.narrow(0, 0, parts * part_bytes);
    for (at::Tensor& part :
         used.view(layer.scalar_type()).split(part_bytes / element)) {
      divided.push_back(std::move(part));
    }
  }
  return divided;
}

std::optional<size_t> first_unlike(const Tensors& tensors) {
  for (size_t index = 1; index < tensors.size(); ++index) {
    const at::Tensor& tensor = tensors[index];
    const at::Tensor& first = tensors.front();
    if (tensor.sizes() != first.sizes() || tensor.strides() != first.strides() ||
        tensor.scalar_type() != first.scalar_type() ||
        tensor.device() != first.device()) {
      return index;
    }
  }
  return std::nullopt;
}

/// The rows of the table. A copy: another thread may change it meanwhile.
std::vector<kv::Piece> as_pieces(const py::handle& pieces) {
  require(py::isinstance<Table>(pieces), "pieces as a dense numpy array of int64");
  const auto table = py::reinterpret_borrow<Table>(pieces);
  require(table.ndim() == 2 && table.shape(1) == kv::kPieceColumns,
          "pieces of shape [n, 10]");
  const auto* first = reinterpret_cast<const kv::Piece*>(table.data());
  return {first, first + table.shape(0)};
}

/// Refuses chunks in which a piece is not as dense as on the device.
void require_dense(const kv::Transfer& job) {
  for (const kv::Chunk& chunk : job.windows) {
    require(job.heads == 1 && chunk.planes == 1 &&
                (chunk.tokens == 1 || chunk.token_stride == job.row_bytes),
            "chunks of one plane, one head and dense tokens to copy in place");
  }
}

void transfer(bool to_host, Tensors layers, const std::array<int64_t, 4>& strides,
              int64_t heads, const Tensors& staging, int64_t part_bytes, int64_t parts,
              const std::optional<at::Tensor>& collector, int64_t batch_bytes,
              Tensors chunks, const py::handle& pieces,
              const std::optional<c10::Stream>& stream,
              const std::optional<std::pair<at::Tensor, at::Tensor>>& probe,
              bool in_place, int threads) {
  require(threads >= 1 && threads <= kv::kMaxThreads,
          "threads of 1 to " + std::to_string(kv::kMaxThreads) + ", got " +
              std::to_string(threads));
  require(batch_bytes >= 1, "batch_bytes of at least 1");
  require(!layers.empty() && !chunks.empty(), "at least one layer and one chunk");
  require(chunks.front().scalar_type() == layers.front().scalar_type(),
          "chunks of the layers' element type");
  const int64_t row = chunks.front().dim() == 0 ? 0 : chunks.front().size(-1);
  require(heads >= 1 && row % heads == 0, "chunks with whole heads");
  // Layers may have been allocated in inference mode, and may be written only in it.
  const c10::InferenceMode inference;
  const at::Device chunk_device = in_place ? layers.front().device() : at::kCPU;
  kv::Transfer job;
  job.direction = to_host ? kv::Direction::kGather : kv::Direction::kScatter;
  job.in_place = in_place;
  if (!in_place) job.parts = divide(staging, part_bytes, parts, layers.front());
  job.layers = std::move(layers);
  job.strides = strides;
  if (collector) job.collector = *collector;
  job.batch_bytes = batch_bytes;
  for (size_t index = 0; index < chunks.size(); ++index) {
    job.windows.push_back(as_chunk(chunks[index], index, chunks.front(), chunk_device));
  }
  job.chunks = std::move(chunks);
  job.heads = heads;
  job.row_bytes = row / heads * job.chunks.front().element_size();
  job.pieces = as_pieces(pieces);
  job.stream = stream;
  if (probe) std::tie(job.probe_to, job.probe_from) = *probe;
  job.threads = threads;
  if (in_place) require_dense(job);
  const py::gil_scoped_release released;
  kv::run(job);
}

}  // namespace

PYBIND11_MODULE(kv_transpose, module) {
  module.doc() = "Transfers between paged KV blocks and token-major chunks";
  // Another one with every change of a function's arguments.
  module.attr("INTERFACE") = 3;
  module.attr("MAX_THREADS") = kv::kMaxThreads;
  module.attr("PIECE_COLUMNS") =
      py::make_tuple("chunk", "block", "blocks", "plane", "planes", "head", "heads",
                     "slot", "slots", "token");
  py::register_exception<kv::NotDrained>(module, "NotDrained", PyExc_RuntimeError);
  module.def("first_unlike", &first_unlike, py::arg("tensors"),
             R"(Find a tensor that differs from the first one.

Returns:
    The index of one whose shape, strides, element type or device is another, or None.)");
  module.def("transfer", &transfer, py::arg("to_host"), py::arg("layers"),
             py::arg("strides"), py::arg("heads"), py::arg("staging"),
             py::arg("part_bytes"), py::arg("parts"), py::arg("collector"),
             py::arg("batch_bytes"), py::arg("chunks"), py::arg("pieces"),
             py::arg("stream") = py::none(), py::arg("probe") = py::none(),
             py::arg("in_place") = false, py::arg("threads") = 1,
             R"(Move pieces of every layer into token-major chunks, or back.

While one part of staging is transposed, the copies of the next ones are in flight. They
are complete on return. The GIL is released meanwhile.

Args:
    to_host: Whether chunks are written; layers are otherwise.
    layers: Tensors of one element type, on one device.
    strides: Elements between the blocks, planes, heads and slots of every layer. A
        piece is contiguous: [blocks, planes, heads, slots, head size].
    heads: Heads of each token.
    staging: Buffers of uint8, 1-D and dense, in host memory; they do not overlap.
        Pinned if there is a stream.
    part_bytes: Bytes of a part, whole elements.
    parts: Parts of each buffer that are used.
    collector: 1-D device memory of that type, as large as a part, in which the pieces
        of a batch are collected to cross to or from the host as one copy; or None.
    batch_bytes: Bytes that are staged in a part at a time, unless a piece is larger.
    chunks: Host tensors [planes, layers, tokens, heads * head size], or without planes
        where there is one, with dense tokens.
    pieces: int64 [n, 10], dense, ordered by chunk; its columns are PIECE_COLUMNS.
    stream: Stream of the copies, for this transfer alone; it waits for the current one
        of the caller first. None: copies are synchronous.
    probe: With a stream: pinned and device memory of a few bytes, alike. After a
        failure one is copied to the other until that succeeds.
    in_place: Whether the device copies to and from the chunks by itself. They have one
        head and one plane then and may be on the device, and staging is not used.
    threads: Threads that transpose, the caller included; 1 to MAX_THREADS.

Raises:
    ValueError: A tensor or number is not as above, or a piece does not lie inside of
        the memory that its layers are views of, of a part or of its chunk. No copy has
        been issued then.
    RuntimeError: A copy fails, or what the caller's stream had to do before. No copy is
        in flight, and the stream has no failure left to report.
    NotDrained: The same, but the device does not tell whether copies are in flight.)");
}
