// SPDX-License-Identifier: Apache-2.0
#include "faults/rules.h"

#include "harness.h"

using namespace rbln_sim;
using Action = FaultRule::Action;

namespace {

void check_bad(const std::string& rule, const std::string& why) {
  CHECK_REFUSED("RBLN_SIM_FAULTS: cannot read the rule '" + rule + "': " + why,
                parse_faults("fail:d2h:1," + rule));
}

}  // namespace

TEST(no_text_is_no_rule) { CHECK(parse_faults("").empty()); }

TEST(every_form) {
  const auto rules = parse_faults(
      "fail:h2d:3,delay:d2h:5:20ms,hang:sync:1,hang:graph:2:3s+sticky,"
      "oom:alloc:10+sticky,fail:any:p=0.01,lost:1:25,delay:d2d:p=1:7us");
  CHECK_EQ(rules.size(), 8u);
  CHECK(rules[0].action == Action::kFail && rules[0].kind == Kind::kH2D);
  CHECK_EQ(rules[0].position, 3u);
  CHECK(!rules[0].sticky);
  CHECK(rules[1].action == Action::kDelay && rules[1].kind == Kind::kD2H);
  CHECK_EQ(rules[1].time.count(), 20000);
  CHECK(rules[2].action == Action::kHang && rules[2].kind == Kind::kSync);
  CHECK_EQ(rules[2].time.count(), 0);
  CHECK_EQ(rules[3].time.count(), 3000000);
  CHECK(rules[3].sticky && rules[3].kind == Kind::kGraph);
  CHECK(rules[4].action == Action::kOom && rules[4].sticky);
  CHECK(!rules[5].kind.has_value());
  CHECK_EQ(rules[5].position, 0u);
  CHECK_EQ(rules[5].probability, 0.01);
  CHECK(rules[6].action == Action::kLost);
  CHECK_EQ(rules[6].device, 1u);
  CHECK_EQ(rules[6].position, 25u);
  CHECK_EQ(rules[7].time.count(), 7);
  CHECK_EQ(rules[7].text, "delay:d2d:p=1:7us");
}

TEST(a_bad_rule_is_named_with_the_reason) {
  check_bad("", "there is no action ''");
  check_bad("break:d2h:1", "there is no action 'break'");
  check_bad("fail", "it has 1 fields");
  check_bad("fail:d2h", "it has 2 fields");
  check_bad("fail:d2h:1:5ms", "it has 4 fields");
  check_bad("delay:d2h:1", "it has 3 fields");
  check_bad("fail:copy:1", "there is no kind 'copy'");
  check_bad("fail:d2h:0", "'0' is not a position of at least 1");
  check_bad("fail:d2h:-1", "'-1' is not a position");
  check_bad("fail:d2h:x", "'x' is not a position");
  check_bad("fail:d2h:99999999999999", "'99999999999999' is not a position");
  check_bad("fail:d2h:p=0", "'0' is not a probability");
  check_bad("fail:d2h:p=1.5", "'1.5' is not a probability");
  check_bad("fail:d2h:p=", "'' is not a probability");
  check_bad("fail:d2h:p=nan", "'nan' is not a probability");
  check_bad("delay:d2h:1:5", "'5' is not a time with us, ms or s");
  check_bad("delay:d2h:1:ms", "'' is not a time");
  check_bad("delay:d2h:1:1.5ms", "'1.5ms' is not a time");
  check_bad("hang:d2h:1:0s", "'0' is not a time of at least 1");
  check_bad("oom:d2h:1", "only alloc runs out of memory");
  check_bad("fail:d2h:1+often", "'+' begins '+sticky'");
  check_bad("lost:0:5+sticky", "a lost device is lost for good");
  check_bad("lost:x:5", "'x' is not a device");
  check_bad("lost:4294967296:5", "there is no device 4294967296");
  check_bad("hang:d2h:1:1000001s", "'1000001s' is more than 10^12 us");
  check_bad(" fail:d2h:1", "there is no action ' fail'");
}

HARNESS_MAIN()
