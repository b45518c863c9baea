// SPDX-License-Identifier: Apache-2.0
//
// Bytes between NPUs. Sending to another rank and receiving from one is simulated,
// which is what pipeline parallelism needs. Collectives are not: torch-rbln sends host
// tensors through gloo, and tensor parallelism needs no more than the set-up of a
// group.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "api/api.h"
#include "device/device.h"
#include "device/peers.h"
#include "memory/memory.h"
#include "stream/operation.h"
#include "stream/stream.h"

using namespace rbln_sim;

namespace {

RetCode not_simulated(const char* operation) {
  return guarded(operation, [] {
    refuse(kFailure, "collectives on device memory are not simulated");
  });
}

// Of the program whose processes form groups: rank 0 of all makes it up, and only the
// group of all ranks is told of it.
std::string& program() {
  static auto* name = new std::string("program");
  return *name;
}

std::unique_ptr<Peers> make_peers(int rank, int size, int group,
                                  const std::vector<int>& ranks) {
  if (size < 1 || rank < 0 || rank >= size) {
    refuse(kInvalid, "there is no rank ", rank, " in a group of ", size);
  }
  std::string name = program() + "-" + std::to_string(group);
  for (const int member : ranks) name += "." + std::to_string(member);
  return std::make_unique<Peers>(name, rank, size);
}

Peers& set_up(const std::unique_ptr<Peers>& peers) {
  if (peers == nullptr) refuse(kInvalid, "the group was not set up");
  return *peers;
}

// A checked range of device memory, when the current stream is done with it.
Range settled(void* data, int bytes) {
  if (bytes <= 0) refuse(kInvalid, "cannot move ", bytes, " bytes");
  Range range = resolve(reinterpret_cast<uint64_t>(data), static_cast<uint64_t>(bytes));
  drain_current_stream(range.allocation->device().id());
  return range;
}

}  // namespace

namespace rbln {

Rccl::Rccl() {}
Rccl::~Rccl() {}

RetCode Rccl::Init(int rank, int size, int group, const std::vector<int>& ranks,
                   int torch_device) {
  return use("Rccl::Init", [&] {
    device(static_cast<uint32_t>(torch_device));
    peers_ = make_peers(rank, size, group, ranks);
  });
}

RetCode Rccl::InitWithUniqueId(int rank, int size, int group,
                               const std::vector<int>& ranks, int torch_device,
                               const rccl_unique_id* id) {
  return use("Rccl::InitWithUniqueId", [&] {
    device(static_cast<uint32_t>(torch_device));
    if (id == nullptr) refuse(kInvalid, "the pointer for the id is null");
    program() = std::string(id->root_address,
                            strnlen(id->root_address, sizeof id->root_address));
    peers_ = make_peers(rank, size, group, ranks);
  });
}

RetCode Rccl::PrepareContextAndExportMem(int torch_device) {
  return use("Rccl::PrepareContextAndExportMem",
             [&] { device(static_cast<uint32_t>(torch_device)); });
}

RetCode Rccl::GetUniqueIdForBroadcast(rccl_unique_id* id) {
  return use("Rccl::GetUniqueIdForBroadcast", [&] {
    out(id) = {};
    uint32_t random = 0;
    const int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    const bool got = file >= 0 && read(file, &random, sizeof random) == sizeof random;
    if (file >= 0) close(file);
    if (!got) refuse(kFailure, "cannot read /dev/urandom");
    // No address: nothing of the network is simulated. It only has to be unique.
    std::snprintf(id->root_address, sizeof id->root_address, "p%08x", random);
  });
}

// torch-rbln names the bytes as elements of one byte.
RetCode Rccl::Send(void* data, int bytes, RcclDataType, int peer, rccl_extra_args*) {
  return use("Rccl::Send", [&] {
    Peers& peers = set_up(peers_);
    const Range range = settled(data, bytes);
    perform({Kind::kD2D, range.allocation->device().id(), range.length, 1},
            [&](uint64_t) {
              const auto source = range.allocation->source(range.offset);
              peers.send(peer, source.span.bytes, range.length);
            });
  });
}

RetCode Rccl::Recv(void* data, int bytes, RcclDataType, int peer, rccl_extra_args*) {
  return use("Rccl::Recv", [&] {
    Peers& peers = set_up(peers_);
    const Range range = settled(data, bytes);
    perform({Kind::kD2D, range.allocation->device().id(), range.length, 1},
            [&](uint64_t) {
              const Span target =
                  range.allocation->device_target(range.offset, range.length);
              peers.receive(peer, target.bytes, range.length);
            });
  });
}

RetCode Rccl::Broadcast(void*, void*, int, RcclDataType, int, rccl_extra_args*) {
  return not_simulated("Rccl::Broadcast");
}

RetCode Rccl::AllGather(void*, const std::vector<void*>&, int, RcclDataType, int,
                        rccl_extra_args*) {
  return not_simulated("Rccl::AllGather");
}

RetCode Rccl::AllReduce(void*, void*, int, RcclDataType, RcclReduceOp, int,
                        rccl_extra_args*) {
  return not_simulated("Rccl::AllReduce");
}

RetCode Rccl::Scatter(const std::vector<void*>&, void*, int, RcclDataType, int,
                      rccl_extra_args*) {
  return not_simulated("Rccl::Scatter");
}

RetCode Rccl::ReduceScatter(const std::vector<void*>&, void*, int, RcclDataType,
                            RcclReduceOp, int, rccl_extra_args*) {
  return not_simulated("Rccl::ReduceScatter");
}

RetCode Rccl::CheckChunksDeviceAddrsContiguous(const std::vector<void*>&, int,
                                               RcclDataType, const char*) {
  return not_simulated("Rccl::CheckChunksDeviceAddrsContiguous");
}

}  // namespace rbln
