// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace rbln_sim {

/// A zero-filled buffer that takes host memory only where it is written.
class Bytes {
 public:
  /// Throws std::bad_alloc.
  explicit Bytes(size_t size);
  ~Bytes();
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  /// Make all bytes zero again, giving memory back where that is possible.
  void zero();

 private:
  bool mapped() const;
  size_t size_;
  char* data_;
};

}  // namespace rbln_sim
