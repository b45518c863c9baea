// SPDX-License-Identifier: Apache-2.0
#include "refusal.h"

#include <new>

#include "harness.h"

using namespace rbln_sim;

TEST(a_message_is_the_parts_in_order) {
  CHECK_EQ(harness::refusal_of([] { refuse(kInvalid, "a ", 1, ' ', hex(255)); }),
           "a 1 0xff");
}

TEST(a_body_that_returns_is_success_and_silent) {
  CHECK_EQ(harness::stderr_of([] { CHECK_EQ(guarded("call", [] {}), kSuccess); }), "");
}

TEST(a_refusal_becomes_its_code_and_one_line) {
  for (const RetCode code : {kFailure, kInvalid}) {
    const std::string text = harness::stderr_of(
        [&] { CHECK_EQ(guarded("call", [&] { refuse(code, "no"); }), code); });
    CHECK_EQ(text, "[rbln-sim] call: no\n");
  }
}

TEST(other_exceptions_become_failure) {
  CHECK_FAILS(kFailure, "call: the host is out of memory",
              guarded("call", [] { throw std::bad_alloc(); }));
  CHECK_FAILS(kFailure, "call: odd",
              guarded("call", [] { throw std::runtime_error("odd"); }));
}

HARNESS_MAIN()
