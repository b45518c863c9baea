// SPDX-License-Identifier: Apache-2.0
//
// The link between NPUs of different processes: a named pipe in the state folder for
// each pair of ranks and direction.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace rbln_sim {

/// The other ranks of a group, as one rank reaches them.
///
/// A message goes when both sides are there: sending waits for the receiver's first
/// call, and receiving for the sender's. Messages between two ranks keep their order.
class Peers {
 public:
  /// `group` is part of file names and the same for all ranks of one group.
  Peers(std::string group, int rank, int size);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  /// Throw Refusal if there is no such rank, if its process has ended, or if the two
  /// sides name different lengths.
  void send(int peer, const char* bytes, uint64_t length);
  void receive(int peer, char* bytes, uint64_t length);

 private:
  struct Direction {
    std::mutex mutex;
    // Open pipes by peer.
    std::map<int, int> files;
  };

  void check(int peer) const;
  std::string path(int from, int to) const;

  const std::string group_;
  const int rank_;
  const int size_;
  Direction out_;
  Direction in_;
};

}  // namespace rbln_sim
