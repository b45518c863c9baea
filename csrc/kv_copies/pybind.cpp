// SPDX-License-Identifier: Apache-2.0
//
// The Python module lmcache.kv_copies: many copies between device tensors and one host
// buffer, issued by one call. A view and a list entry made by Python take longer than
// the device's driver takes to accept the copy.
#include <torch/extension.h>

#include <cstdint>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

using Numbers = std::vector<int64_t>;

void require(bool holds, const std::string& wanted) {
  if (!holds) throw py::value_error("wanted " + wanted);
}

/// Views elements [first, first + size) of a tensor's memory.
at::Tensor view(const at::Tensor& tensor, int64_t first, int64_t size) {
  constexpr int64_t kDense = 1;
  return at::as_strided(tensor, {&size, 1}, {&kDense, 1}, first);
}

/// Refuses regions that are not inside of their layer's memory.
void check(const std::vector<at::Tensor>& layers, const at::Tensor& staged,
           const Numbers& numbers, const Numbers& starts, const Numbers& sizes) {
  require(numbers.size() == sizes.size() && starts.size() == sizes.size(),
          "as many layers and starts as sizes: " + std::to_string(sizes.size()));
  require(staged.dim() == 1 && staged.is_contiguous(), "staging of one dense axis");
  for (const at::Tensor& layer : layers) {
    require(layer.scalar_type() == staged.scalar_type(),
            "layers and staging of one element type");
  }
  int64_t room = staged.numel();
  for (size_t index = 0; index < sizes.size(); ++index) {
    const std::string region = "region " + std::to_string(index);
    const int64_t number = numbers[index];
    require(number >= 0 && number < static_cast<int64_t>(layers.size()),
            region + " in one of " + std::to_string(layers.size()) + " layers");
    const at::Tensor& layer = layers[static_cast<size_t>(number)];
    const auto elements =
        static_cast<int64_t>(layer.storage().nbytes() / layer.element_size()) -
        layer.storage_offset();
    const int64_t size = sizes[index];
    const int64_t start = starts[index];
    require(size >= 1 && start >= 0 && start < elements && size <= elements - start,
            region + " (start " + std::to_string(start) + ", size " +
                std::to_string(size) + ") inside of the " + std::to_string(elements) +
                " elements of its layer");
    require(size <= room, region + " inside of staging, which has " +
                              std::to_string(staged.numel()) + " elements");
    room -= size;
  }
}

void copy_regions(const std::vector<at::Tensor>& layers, const at::Tensor& staged,
                  const Numbers& numbers, const Numbers& starts, const Numbers& sizes,
                  bool to_host, bool non_blocking) {
  const py::gil_scoped_release released;
  check(layers, staged, numbers, starts, sizes);
  std::vector<at::Tensor> regions;
  std::vector<at::Tensor> windows;
  regions.reserve(sizes.size());
  windows.reserve(sizes.size());
  int64_t position = staged.storage_offset();
  for (size_t index = 0; index < sizes.size(); ++index) {
    const at::Tensor& layer = layers[static_cast<size_t>(numbers[index])];
    regions.push_back(
        view(layer, layer.storage_offset() + starts[index], sizes[index]));
    windows.push_back(view(staged, position, sizes[index]));
    position += sizes[index];
  }
  if (to_host) {
    at::_foreach_copy_(windows, regions, non_blocking);
  } else {
    at::_foreach_copy_(regions, windows, non_blocking);
  }
}

}  // namespace

PYBIND11_MODULE(kv_copies, module) {
  module.doc() = "Batches of copies between device tensors and a staging buffer";
  module.def("copy_regions", &copy_regions, py::arg("layers"), py::arg("staged"),
             py::arg("layer_of"), py::arg("starts"), py::arg("sizes"),
             py::arg("to_host"), py::arg("non_blocking"),
             R"(Copy regions of layers into staging, one after the other, or out of it.

The copies are one torch operation on the current stream; the GIL is released while it
is made. Regions that are written must not overlap.

Args:
    layers: Tensors of one element type, on one device.
    staged: Tensor of that type, one dense axis.
    layer_of: Index of each region's layer.
    starts: Where each starts, in elements from the layer's first.
    sizes: Elements of each.
    to_host: Whether staging is written; layers are otherwise.
    non_blocking: As torch's.

Raises:
    ValueError: The lists differ in length, types differ, or a region lies outside of
        its layer or of staging. No copy has been issued then.
    RuntimeError: A copy fails.)");
}
