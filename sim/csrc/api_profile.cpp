// SPDX-License-Identifier: Apache-2.0
//
// The counters behind torch.rbln.explain().
#include "abi.h"
#include "counters.h"
#include "ledger.h"

using namespace rbln_sim;

namespace {

template <size_t N>
void read(const std::array<Tally, N>& tallies, uint64_t* counts, uint64_t* bytes,
          uint32_t room) {
  for (size_t i = 0; i < N && i < room; ++i) {
    counts[i] = tallies[i].count;
    bytes[i] = tallies[i].bytes;
  }
}

void read(const Tally& tally, uint64_t* count, uint64_t* bytes) {
  *count = tally.count;
  *bytes = tally.bytes;
}

}  // namespace

uint32_t rbln_prof_v2v_hidden_num_reasons() { return kHiddenReasons; }
uint32_t rbln_prof_v2v_reject_num_reasons() { return kRejectReasons; }
void rbln_prof_get_v2v_hidden_d2h(uint64_t* counts, uint64_t* bytes, uint32_t n) {
  read(counters().hidden, counts, bytes, n);
}
void rbln_prof_get_v2v_reject(uint64_t* counts, uint64_t* bytes, uint32_t n) {
  read(counters().reject, counts, bytes, n);
}
void rbln_prof_get_host_sync_d2h(uint64_t* count, uint64_t* bytes) {
  read(counters().sync_d2h, count, bytes);
}
void rbln_prof_get_host_sync_h2d(uint64_t* count, uint64_t* bytes) {
  read(counters().sync_h2d, count, bytes);
}
void rbln_prof_get_memory(uint64_t* current, uint64_t* peak) {
  const MemoryGauge gauge = process_memory();
  *current = gauge.current;
  *peak = gauge.peak;
}
void rbln_prof_reset_v2v_hidden_d2h() {
  for (Tally& tally : counters().hidden) tally.reset();
}
void rbln_prof_reset_v2v_reject() {
  for (Tally& tally : counters().reject) tally.reset();
}
void rbln_prof_reset_host_sync_d2h() { counters().sync_d2h.reset(); }
void rbln_prof_reset_host_sync_h2d() { counters().sync_h2d.reset(); }
