// SPDX-License-Identifier: Apache-2.0
//
// Collectives. Setting a group up succeeds, because torch-rbln does it before it sends
// host tensors through gloo; moving device data between processes is not simulated.
#include "api.h"
#include "device.h"

using namespace rbln_sim;

namespace {

RetCode not_simulated(const char* operation) {
  return guarded(operation, [] {
    refuse(kFailure, "collectives on device memory are not simulated");
  });
}

}  // namespace

namespace rbln {

Rccl::Rccl() {}
Rccl::~Rccl() {}

RetCode Rccl::Init(int, int, int, const std::vector<int>&, int torch_device) {
  return use("Rccl::Init", [&] { device(static_cast<uint32_t>(torch_device)); });
}

RetCode Rccl::InitWithUniqueId(int, int, int, const std::vector<int>&, int torch_device,
                               const rccl_unique_id*) {
  return use("Rccl::InitWithUniqueId",
             [&] { device(static_cast<uint32_t>(torch_device)); });
}

RetCode Rccl::PrepareContextAndExportMem(int torch_device) {
  return use("Rccl::PrepareContextAndExportMem",
             [&] { device(static_cast<uint32_t>(torch_device)); });
}

RetCode Rccl::GetUniqueIdForBroadcast(rccl_unique_id* id) {
  // Nothing ever connects to it.
  return use("Rccl::GetUniqueIdForBroadcast", [&] { out(id) = {}; });
}

RetCode Rccl::Send(void*, int, RcclDataType, int, rccl_extra_args*) {
  return not_simulated("Rccl::Send");
}

RetCode Rccl::Recv(void*, int, RcclDataType, int, rccl_extra_args*) {
  return not_simulated("Rccl::Recv");
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
