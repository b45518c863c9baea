// SPDX-License-Identifier: Apache-2.0
//
// The grammar of RBLN_SIM_FAULTS, documented in the README:
//   RULES  = RULE {"," RULE}
//   RULE   = ("fail" | "oom") ":" KIND ":" WHEN ["+sticky"]
//          | "delay" ":" KIND ":" WHEN ":" TIME ["+sticky"]
//          | "hang" ":" KIND ":" WHEN [":" TIME] ["+sticky"]
//          | "lost" ":" DEVICE ":" COUNT
//   KIND   = "d2h" | "h2d" | "d2d" | "graph" | "sync" | "alloc" | "any"
//   WHEN   = NUMBER | "p=" PROBABILITY
//   TIME   = NUMBER ("us" | "ms" | "s")
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stream/cost.h"

namespace rbln_sim {

struct FaultRule {
  enum class Action { kFail, kDelay, kHang, kOom, kLost };
  Action action;
  /// None: any kind. Not for kLost.
  std::optional<Kind> kind;
  /// The position, from 1, of the operation that it strikes; for kLost the number of
  /// operations that the device still does. 0: by probability.
  uint64_t position = 0;
  double probability = 0;
  /// How long it delays or hangs; 0: hangs until the process ends.
  std::chrono::microseconds time{0};
  /// It strikes all later operations of the kind too.
  bool sticky = false;
  /// Device of kLost.
  uint32_t device = 0;
  /// As it was written.
  std::string text;
};

/// Whether an operation that the rule strikes reports a failure without hanging.
inline bool fails_of(const FaultRule& rule) {
  return rule.action == FaultRule::Action::kFail ||
         rule.action == FaultRule::Action::kOom;
}

/// Throws Refusal naming RBLN_SIM_FAULTS and the rule that cannot be read.
std::vector<FaultRule> parse_faults(const std::string& text);

/// The name of `kind` in rules.
const char* fault_name(Kind kind);

}  // namespace rbln_sim
