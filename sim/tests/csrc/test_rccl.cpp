// SPDX-License-Identifier: Apache-2.0
#include "abi.h"
#include "harness.h"

using rbln::Rccl;

TEST(setting_up_a_group_succeeds) {
  Rccl rccl;
  rccl_unique_id id;
  std::memset(&id, 0xFF, sizeof id);
  CHECK_EQ(rccl.PrepareContextAndExportMem(0), kSuccess);
  CHECK_EQ(rccl.GetUniqueIdForBroadcast(&id), kSuccess);
  CHECK_EQ(id.root_address[0], '\0');
  CHECK_EQ(id.rdma_base_port, 0);
  CHECK_EQ(rccl.Init(0, 2, 1, {0, 1}, 0), kSuccess);
  CHECK_EQ(rccl.InitWithUniqueId(0, 2, 0, {0, 1}, 1, &id), kSuccess);
  CHECK_FAILS(kInvalid, "Rccl::Init: there is no device rbln:7",
              rccl.Init(0, 1, 0, {0}, 7));
}

TEST(moving_data_fails_by_name) {
  Rccl rccl;
  const Rccl::RcclDataType type{};
  const Rccl::RcclReduceOp op{};
  const std::vector<void*> none;
  CHECK_FAILS(kFailure, "Rccl::Send:", rccl.Send(nullptr, 1, type, 0, nullptr));
  CHECK_FAILS(kFailure, "Rccl::Recv:", rccl.Recv(nullptr, 1, type, 0, nullptr));
  CHECK_FAILS(kFailure, "Rccl::Broadcast:",
              rccl.Broadcast(nullptr, nullptr, 1, type, 0, nullptr));
  CHECK_FAILS(kFailure,
              "Rccl::AllGather:", rccl.AllGather(nullptr, none, 1, type, 0, nullptr));
  CHECK_FAILS(kFailure, "Rccl::AllReduce:",
              rccl.AllReduce(nullptr, nullptr, 1, type, op, 0, nullptr));
  CHECK_FAILS(kFailure,
              "Rccl::Scatter:", rccl.Scatter(none, nullptr, 1, type, 0, nullptr));
  CHECK_FAILS(kFailure, "Rccl::ReduceScatter:",
              rccl.ReduceScatter(none, nullptr, 1, type, op, 0, nullptr));
  CHECK_FAILS(kFailure, "Rccl::CheckChunksDeviceAddrsContiguous:",
              rccl.CheckChunksDeviceAddrsContiguous(none, 1, type, "AllGather"));
}

HARNESS_MAIN()
