// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <thread>

#include "api/abi.h"
#include "device/peers.h"
#include "harness.h"

using rbln::Rccl;

TEST(setting_up_a_group_succeeds) {
  Rccl rccl;
  rccl_unique_id id;
  std::memset(&id, 0xFF, sizeof id);
  CHECK_EQ(rccl.PrepareContextAndExportMem(0), kSuccess);
  CHECK_EQ(rccl.GetUniqueIdForBroadcast(&id), kSuccess);
  CHECK_EQ(std::strlen(id.root_address), 9u);
  CHECK_EQ(id.rdma_base_port, 0);
  rccl_unique_id other;
  CHECK_EQ(rccl.GetUniqueIdForBroadcast(&other), kSuccess);
  CHECK(std::strcmp(id.root_address, other.root_address) != 0);
  CHECK_EQ(rccl.Init(0, 2, 1, {0, 1}, 0), kSuccess);
  CHECK_EQ(rccl.InitWithUniqueId(0, 2, 0, {0, 1}, 1, &id), kSuccess);
  CHECK_FAILS(kInvalid, "Rccl::Init: there is no device rbln:7",
              rccl.Init(0, 1, 0, {0}, 7));
  CHECK_FAILS(kInvalid, "Rccl::Init: there is no rank 2 in a group of 2",
              rccl.Init(2, 2, 0, {0, 1}, 0));
}

// Both ranks in one process, a device and a thread each.
TEST(what_is_sent_arrives_in_order) {
  constexpr int kBytes = 200'000;  // more than a pipe holds
  Rccl ranks[2];
  uint64_t memory[2];
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_EQ(ranks[rank].Init(rank, 2, 3, {0, 1}, rank), kSuccess);
    CHECK_EQ(rbln::rbln_malloc_eager(rank, 2 * kBytes, memory[rank]), kSuccess);
  }
  std::vector<char> wanted(2 * kBytes);
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<char>(i * 31 >> 3);
  CHECK_EQ(rbln::rbln_memcpy_h2v(reinterpret_cast<uint64_t>(wanted.data()), memory[0],
                                 wanted.size()),
           kSuccess);
  const auto at = [&](int rank, int part) {
    return reinterpret_cast<void*>(memory[rank] + static_cast<uint64_t>(part) * kBytes);
  };
  std::thread sender([&] {
    for (int part = 0; part < 2; ++part) {
      ranks[0].Send(at(0, part), kBytes, {}, 1, nullptr);
    }
  });
  for (int part = 0; part < 2; ++part) {
    CHECK_EQ(ranks[1].Recv(at(1, part), kBytes, {}, 0, nullptr), kSuccess);
  }
  sender.join();
  std::vector<char> got(wanted.size());
  CHECK_EQ(rbln::rbln_memcpy_v2h(memory[1], reinterpret_cast<uint64_t>(got.data()),
                                 got.size()),
           kSuccess);
  CHECK(got == wanted);
}

TEST(two_sides_that_do_not_fit_are_refused) {
  Rccl ranks[2];
  uint64_t memory[2];
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_EQ(ranks[rank].Init(rank, 2, 0, {0, 1}, rank), kSuccess);
    CHECK_EQ(rbln::rbln_malloc_eager(rank, 4096, memory[rank]), kSuccess);
  }
  const auto at = [&](int rank) { return reinterpret_cast<void*>(memory[rank]); };
  std::thread sender([&] { ranks[0].Send(at(0), 64, {}, 1, nullptr); });
  CHECK_FAILS(kInvalid, "Rccl::Recv: rank 0 sent 64 bytes, 128 were wanted",
              ranks[1].Recv(at(1), 128, {}, 0, nullptr));
  sender.join();
  CHECK_FAILS(kInvalid, "Rccl::Send: rank 0 is none of the others in a group of 2",
              ranks[0].Send(at(0), 64, {}, 0, nullptr));
  CHECK_FAILS(kInvalid, "Rccl::Send: rank 2 is none of the others in a group of 2",
              ranks[0].Send(at(0), 64, {}, 2, nullptr));
  CHECK_FAILS(kInvalid, "Rccl::Send: cannot move 0 bytes",
              ranks[0].Send(at(0), 0, {}, 1, nullptr));
  Rccl alone;
  CHECK_FAILS(kInvalid, "Rccl::Recv: the group was not set up",
              alone.Recv(at(1), 64, {}, 0, nullptr));
}

TEST(a_rank_that_has_ended_is_named) {
  auto gone = std::make_unique<Rccl>();
  Rccl left;
  uint64_t memory[2];
  CHECK_EQ(gone->Init(0, 2, 0, {0, 1}, 0), kSuccess);
  CHECK_EQ(left.Init(1, 2, 0, {0, 1}, 1), kSuccess);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_EQ(rbln::rbln_malloc_eager(rank, 4096, memory[rank]), kSuccess);
  }
  const auto at = [&](int rank) { return reinterpret_cast<void*>(memory[rank]); };
  std::thread other([&] {
    gone->Send(at(0), 64, {}, 1, nullptr);
    gone->Recv(at(0), 64, {}, 1, nullptr);
    gone.reset();
  });
  CHECK_EQ(left.Recv(at(1), 64, {}, 0, nullptr), kSuccess);
  CHECK_EQ(left.Send(at(1), 64, {}, 0, nullptr), kSuccess);
  other.join();
  CHECK_FAILS(kFailure, "Rccl::Recv: rank 0 has ended",
              left.Recv(at(1), 64, {}, 0, nullptr));
  CHECK_FAILS(kFailure, "Rccl::Send: rank 0 has ended",
              left.Send(at(1), 64, {}, 0, nullptr));
}

HARNESS_MAIN()
