// SPDX-License-Identifier: Apache-2.0
#include "api/abi.h"
#include "harness.h"
#include "memory/counters.h"

using rbln_sim::counters;

TEST(the_axes_are_read_by_position) {
  CHECK_EQ(rbln_prof_v2v_hidden_num_reasons(), 3u);
  CHECK_EQ(rbln_prof_v2v_reject_num_reasons(), 9u);
  counters().hidden[0].add(5);
  counters().reject[1].add(6);
  counters().reject[1].add(7);
  uint64_t counts[9], bytes[9];
  rbln_prof_get_v2v_hidden_d2h(counts, bytes, 3);
  CHECK_EQ(counts[0], 1u);
  CHECK_EQ(bytes[0], 5u);
  CHECK_EQ(counts[1] + counts[2], 0u);
  rbln_prof_get_v2v_reject(counts, bytes, 9);
  CHECK_EQ(counts[1], 2u);
  CHECK_EQ(bytes[1], 13u);
  CHECK_EQ(counts[0] + counts[2] + counts[8], 0u);
}

TEST(a_short_array_is_not_overrun) {
  uint64_t counts[] = {7, 7}, bytes[] = {7, 7};
  rbln_prof_get_v2v_reject(counts, bytes, 1);
  CHECK_EQ(counts[0], 0u);
  CHECK_EQ(counts[1], 7u);
  CHECK_EQ(bytes[1], 7u);
}

TEST(each_counter_is_reset_by_its_own_call) {
  counters().hidden[0].add(1);
  counters().reject[1].add(1);
  counters().sync_d2h.add(2);
  counters().sync_h2d.add(3);
  uint64_t count, bytes;
  rbln_prof_get_host_sync_d2h(&count, &bytes);
  CHECK_EQ(count, 1u);
  CHECK_EQ(bytes, 2u);
  rbln_prof_reset_host_sync_d2h();
  rbln_prof_get_host_sync_d2h(&count, &bytes);
  CHECK_EQ(count + bytes, 0u);
  rbln_prof_get_host_sync_h2d(&count, &bytes);
  CHECK_EQ(count, 1u);
  CHECK_EQ(bytes, 3u);
  rbln_prof_reset_host_sync_h2d();
  rbln_prof_get_host_sync_h2d(&count, &bytes);
  CHECK_EQ(count + bytes, 0u);
  CHECK_EQ(counters().hidden[0].count.load(), 1u);
  rbln_prof_reset_v2v_hidden_d2h();
  CHECK_EQ(counters().hidden[0].count.load(), 0u);
  CHECK_EQ(counters().reject[1].count.load(), 1u);
  rbln_prof_reset_v2v_reject();
  CHECK_EQ(counters().reject[1].count.load(), 0u);
}

TEST(the_memory_gauge_has_a_peak) {
  uint64_t vaddr, current, peak;
  rbln::rbln_malloc_eager(0, 1 << 20, vaddr);
  rbln::rbln_free(vaddr);
  rbln_prof_get_memory(&current, &peak);
  CHECK_EQ(current, 0u);
  CHECK_EQ(peak, 1u << 20);
}

HARNESS_MAIN()
