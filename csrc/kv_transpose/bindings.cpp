// SPDX-License-Identifier: Apache-2.0
//
// The Python module lmcache.kv_transpose.
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline.h"
#include "workers.h"

namespace py = pybind11;
namespace kv = kv_transpose;

namespace {

using Tensors = std::vector<at::Tensor>;
using Probe = std::pair<at::Tensor, at::Tensor>;
/// Ids, and how many of them are left alone.
using Blocks = std::pair<std::vector<int64_t>, int64_t>;

kv::Direction direction(bool to_chunks) {
  return to_chunks ? kv::Direction::kGather : kv::Direction::kScatter;
}

kv::Geometry as_geometry(const std::array<int64_t, 5>& sizes,
                         const std::array<int64_t, 2>& strides) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], strides[0], strides[1]};
}

kv::Plan plan_host(bool to_chunks, Tensors layers, const std::array<int64_t, 5>& sizes,
                   const std::array<int64_t, 2>& strides, Tensors chunks,
                   const std::vector<int64_t>& ids, int64_t chunk_tokens, int64_t skip,
                   int64_t max_bytes) {
  return kv::plan_host(direction(to_chunks), std::move(layers),
                       as_geometry(sizes, strides), std::move(chunks), ids,
                       chunk_tokens, skip, max_bytes);
}

kv::Plan plan_device(bool to_chunks, Tensors layers,
                     const std::array<int64_t, 5>& sizes,
                     const std::array<int64_t, 2>& strides, Tensors chunks,
                     std::vector<Blocks> blocks) {
  std::vector<kv::ChunkBlocks> of_chunks;
  for (auto& [ids, skip] : blocks) of_chunks.push_back({std::move(ids), skip, 0});
  return kv::plan_device(direction(to_chunks), std::move(layers),
                         as_geometry(sizes, strides), std::move(chunks),
                         std::move(of_chunks));
}

kv::Resources as_resources(Tensors staging, const std::optional<at::Tensor>& collector,
                           const std::optional<c10::Stream>& stream,
                           const std::optional<Probe>& probe) {
  kv::Resources with;
  with.staging = std::move(staging);
  if (collector) with.collector = *collector;
  if (stream) {
    with.lane = kv::Lane{*stream, {}, {}};
    if (probe) std::tie(with.lane->probe_to, with.lane->probe_from) = *probe;
  }
  return with;
}

void run(const kv::Plan& plan, Tensors staging,
         const std::optional<at::Tensor>& collector,
         const std::optional<c10::Stream>& stream, const std::optional<Probe>& probe,
         int threads, std::optional<int64_t> part_bytes,
         std::optional<int64_t> batch_bytes) {
  kv::Resources with = as_resources(std::move(staging), collector, stream, probe);
  with.threads = threads;
  with.part_bytes = part_bytes.value_or(with.part_bytes);
  with.batch_bytes = batch_bytes.value_or(with.batch_bytes);
  // Layers may have been allocated in inference mode, and may be written only in it.
  const c10::InferenceMode inference;
  const py::gil_scoped_release released;
  kv::run(plan, with);
}

std::pair<double, double> copy_times(const kv::Plan& plan, Tensors staging,
                                     const at::Tensor& collector,
                                     const c10::Stream& stream, const Probe& probe) {
  const kv::Resources with = as_resources(std::move(staging), collector, stream, probe);
  const c10::InferenceMode inference;
  const py::gil_scoped_release released;
  return kv::copy_times(plan, with);
}

bool drain(const c10::Stream& stream, const Probe& probe) {
  const kv::Lane lane{stream, probe.first, probe.second};
  const c10::InferenceMode inference;
  const py::gil_scoped_release released;
  return kv::drain(lane);
}

}  // namespace

PYBIND11_MODULE(kv_transpose, module) {
  module.doc() = "Transfers between paged KV blocks and token-major chunks";
  // Another one with every change of a function's arguments.
  module.attr("INTERFACE") = 4;
  module.attr("MAX_THREADS") = kv::kMaxThreads;
  py::register_exception<kv::NotDrained>(module, "NotDrained", PyExc_RuntimeError);
  py::class_<kv::Plan>(module, "Plan", "A checked transfer; owns its tensors.")
      .def_property_readonly(
          "segments", [](const kv::Plan& plan) { return plan.tiles.size(); },
          "Regions that are contiguous on the device, of all layers.")
      .def_property_readonly(
          "to_chunks",
          [](const kv::Plan& plan) { return plan.direction == kv::Direction::kGather; },
          "Whether chunks are written; layers are otherwise.")
      .def_property_readonly(
          "device", [](const kv::Plan& plan) { return plan.layers.front().device(); },
          "Of the layers.")
      .def_property_readonly(
          "dtype",
          [](const kv::Plan& plan) { return plan.layers.front().scalar_type(); },
          "Of an element.")
      .def_readonly("on_device", &kv::Plan::on_device, "Whether the chunks are, too.")
      .def_readonly("bytes", &kv::Plan::bytes, "Bytes of all segments.")
      .def_readonly("largest_bytes", &kv::Plan::largest_bytes, "Bytes of the largest.")
      .def_readonly(
          "in_place", &kv::Plan::in_place,
          "Whether the device can copy to and from the chunks by itself: their "
          "segments are contiguous, and host memory is pinned.");
  module.def("plan_host", &plan_host, py::arg("to_chunks"), py::arg("layers"),
             py::arg("sizes"), py::arg("strides"), py::arg("chunks"),
             py::arg("block_ids"), py::arg("chunk_tokens"), py::arg("skip_blocks"),
             py::arg("max_bytes"),
             R"(Plan a transfer between layers and token-major chunks in host memory.

Args:
    to_chunks: Whether chunks are written; layers are otherwise.
    layers: Alike, [blocks, planes, heads, slots, head size] with a dense [heads, ...].
    sizes, strides: Of these axes; elements between blocks, and between planes.
    chunks: [planes, layers, tokens, heads * head size], or without planes for one.
    block_ids, skip_blocks: In token order, and how many leading ones are left alone.
    chunk_tokens: Tokens of each chunk; the last one may have fewer.
    max_bytes: Of a segment; what a staging buffer holds.

Raises:
    ValueError: An argument is not as above, a tensor lacks memory, or a byte would be
        written twice.)");
  module.def("plan_device", &plan_device, py::arg("to_chunks"), py::arg("layers"),
             py::arg("sizes"), py::arg("strides"), py::arg("chunks"), py::arg("blocks"),
             R"(Plan copies of whole blocks between layers and chunks on their device.

Args as of plan_host, but a chunk has one dense axis, with its blocks as they lie in a
layer, layer by layer; and blocks are, for each chunk, ids and leading ones to leave.)");
  module.def("run", &run, py::arg("plan"), py::arg("staging"), py::arg("collector"),
             py::arg("stream"), py::arg("probe"), py::arg("threads") = 1,
             py::arg("part_bytes") = py::none(), py::arg("batch_bytes") = py::none(),
             R"(Move every segment of a plan. Complete on return; the GIL is released.

Args:
    staging: Buffers of uint8, 1-D and dense, in host memory, pinned if there is a stream;
        they do not overlap. None, as with chunks on the device: copies are in place.
    collector: 1-D device memory of the layers' type, as large as a buffer, to collect
        segments in; or None.
    stream: Of the copies, for this transfer alone; it waits for the caller's current one
        first. None: copies are synchronous.
    probe: With a stream: pinned and device memory of a few bytes, alike.
    threads: That transpose, the caller included; 1 to MAX_THREADS.
    part_bytes, batch_bytes: Used of a buffer, and copied at a time; see pipeline.h.

Raises:
    ValueError: An argument is not as above. No copy has been issued then.
    RuntimeError: A copy fails, or what the caller's stream had to do before. No copy is
        in flight, and the stream has no failure left to report.
    NotDrained: The same, but the device does not tell whether copies are in flight.)");
  module.def("copy_times", &copy_times, py::arg("plan"), py::arg("staging"),
             py::arg("collector"), py::arg("stream"), py::arg("probe"),
             "Microseconds of a small copy to staging, and to the collector; raises as "
             "run.");
  module.def("drain", &drain, py::arg("stream"), py::arg("probe"),
             "Wait until nothing is in flight on a stream; whether that is so.");
}
