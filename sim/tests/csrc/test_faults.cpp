// SPDX-License-Identifier: Apache-2.0
#include "faults/faults.h"

#include "harness.h"

using namespace rbln_sim;

namespace {

// The texts of the rules that strike `count` operations of `kind`; '.' for none.
std::string struck(FaultSchedule& schedule, Kind kind, int count, uint32_t device = 0) {
  std::string all;
  harness::stderr_of([&] {
    for (int i = 0; i < count; ++i) {
      const FaultRule* rule = schedule.next(kind, device);
      all += rule == nullptr ? "." : rule->text;
    }
  });
  return all;
}

}  // namespace

TEST(a_rule_strikes_its_position_of_its_kind_once) {
  FaultSchedule schedule(parse_faults("fail:h2d:3"), 0);
  CHECK_EQ(struck(schedule, Kind::kD2H, 5), ".....");
  CHECK_EQ(struck(schedule, Kind::kH2D, 5), "..fail:h2d:3..");
}

TEST(any_counts_all_kinds_and_devices) {
  FaultSchedule schedule(parse_faults("fail:any:3"), 0);
  CHECK_EQ(struck(schedule, Kind::kD2H, 1, 0), ".");
  CHECK_EQ(struck(schedule, Kind::kAlloc, 1, 1), ".");
  CHECK_EQ(struck(schedule, Kind::kSync, 2, 0), "fail:any:3.");
}

TEST(a_sticky_rule_strikes_from_then_on) {
  FaultSchedule schedule(parse_faults("fail:d2h:2+sticky"), 0);
  CHECK_EQ(struck(schedule, Kind::kD2H, 4),
           ".fail:d2h:2+stickyfail:d2h:2+stickyfail:d2h:2+sticky");
  CHECK_EQ(struck(schedule, Kind::kH2D, 2), "..");
}

TEST(the_first_rule_wins) {
  FaultSchedule schedule(parse_faults("fail:d2h:1,fail:any:1,fail:any:2"), 0);
  CHECK_EQ(struck(schedule, Kind::kD2H, 2), "fail:d2h:1fail:any:2");
}

TEST(the_same_seed_has_the_same_schedule) {
  const char* rules = "fail:any:p=0.01,delay:d2h:p=0.02:1ms";
  std::vector<std::string> schedules;
  for (const uint64_t seed : {7, 7, 8}) {
    FaultSchedule schedule(parse_faults(rules), seed);
    schedules.push_back(struck(schedule, Kind::kD2H, 20000));
  }
  CHECK_EQ(schedules[0], schedules[1]);
  CHECK(schedules[0] != schedules[2]);
}

TEST(a_probability_is_kept) {
  FaultSchedule schedule(parse_faults("fail:any:p=0.1"), 3);
  int count = 0;
  harness::stderr_of([&] {
    for (int i = 0; i < 10000; ++i) count += schedule.next(Kind::kH2D, 0) != nullptr;
  });
  CHECK(count > 900);
  CHECK(count < 1100);
}

TEST(a_rule_does_not_move_another) {
  FaultSchedule alone(parse_faults("fail:d2h:p=0.5"), 0);
  FaultSchedule both(parse_faults("fail:d2h:p=0.5,fail:any:p=0.5"), 0);
  for (int i = 0; i < 100; ++i) {
    const std::string one = struck(alone, Kind::kD2H, 1);
    const std::string two = struck(both, Kind::kD2H, 1);
    CHECK_EQ(one == "fail:d2h:p=0.5", two == "fail:d2h:p=0.5");
  }
}

TEST(a_strike_is_told_with_seed_and_index) {
  FaultSchedule schedule(parse_faults("fail:d2h:2"), 42);
  schedule.next(Kind::kH2D, 1);
  schedule.next(Kind::kD2H, 1);
  CHECK_EQ(harness::stderr_of([&] { schedule.next(Kind::kD2H, 1); }),
           "[rbln-sim] fault: fail:d2h:2 strikes d2h 2 (operation 3) on rbln:1, "
           "seed 42\n");
}

TEST(a_lost_device_stays_lost_and_the_others_live) {
  FaultSchedule schedule(parse_faults("lost:1:2"), 9);
  CHECK_EQ(struck(schedule, Kind::kD2H, 5, 0), ".....");
  CHECK_EQ(struck(schedule, Kind::kD2H, 2, 1), "..");
  schedule.refuse_lost(1);
  const std::string line = harness::stderr_of([&] {
    CHECK_REFUSED("rbln:1 is lost (lost:1:2)", schedule.next(Kind::kSync, 1));
  });
  CHECK_EQ(line, "[rbln-sim] fault: lost:1:2 strikes operation 3 on rbln:1, seed 9\n");
  CHECK_REFUSED("rbln:1 is lost", schedule.next(Kind::kD2H, 1));
  CHECK_REFUSED("rbln:1 is lost", schedule.refuse_lost(1));
  schedule.refuse_lost(0);
  CHECK_EQ(struck(schedule, Kind::kD2H, 1, 0), ".");
}

TEST(a_device_may_be_lost_from_the_start) {
  FaultSchedule schedule(parse_faults("lost:0:0"), 0);
  CHECK_REFUSED("rbln:0 is lost", schedule.next(Kind::kAlloc, 0));
}

HARNESS_MAIN()
