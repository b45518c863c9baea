// SPDX-License-Identifier: Apache-2.0
#include "faults/faults.h"

#include <string>

#include "refusal.h"
#include "settings.h"
#include "stream/random.h"

namespace rbln_sim {

FaultSchedule::FaultSchedule(std::vector<FaultRule> rules, uint64_t seed)
    : rules_(std::move(rules)),
      seed_(seed),
      counts_(kKinds),
      struck_(rules_.size(), false) {}

bool FaultSchedule::strikes(size_t index, uint64_t position) {
  const FaultRule& rule = rules_[index];
  if (rule.sticky && struck_[index]) return true;
  if (rule.position != 0) return position == rule.position;
  const uint64_t random = scramble(scramble(seed_ + index) + position);
  return static_cast<double>(random >> 11) * 0x1p-53 < rule.probability;
}

const FaultRule* FaultSchedule::next(Kind kind, uint32_t device) {
  if (rules_.empty()) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t of_kind = ++counts_[static_cast<unsigned>(kind)];
  ++all_;
  const uint64_t of_device = ++by_device_[device];
  for (const FaultRule& rule : rules_) {
    if (rule.action != FaultRule::Action::kLost || rule.device != device) continue;
    if (of_device <= rule.position || lost_.count(device) != 0) continue;
    lost_[device] = &rule;
    report("fault", rule.text + " strikes operation " + std::to_string(of_device) +
                        " on rbln:" + std::to_string(device) + ", seed " +
                        std::to_string(seed_));
  }
  if (lost_.count(device) != 0) {
    refuse(kFailure, "rbln:", device, " is lost (", lost_[device]->text, ")");
  }
  const FaultRule* chosen = nullptr;
  for (size_t i = 0; i < rules_.size(); ++i) {
    const FaultRule& rule = rules_[i];
    if (rule.action == FaultRule::Action::kLost) continue;
    if (rule.kind && rule.kind != kind) continue;
    const uint64_t position = rule.kind ? of_kind : all_;
    // Every rule decides, chosen or not: what one does must not move another.
    if (!strikes(i, position)) continue;
    struck_[i] = true;
    if (chosen != nullptr) continue;
    chosen = &rule;
    report("fault", rule.text + " strikes " + fault_name(kind) + " " +
                        std::to_string(of_kind) + " (operation " +
                        std::to_string(all_) + ") on rbln:" + std::to_string(device) +
                        ", seed " + std::to_string(seed_));
  }
  return chosen;
}

void FaultSchedule::refuse_lost(uint32_t device) const {
  if (rules_.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = lost_.find(device);
  if (found != lost_.end()) {
    refuse(kFailure, "rbln:", device, " is lost (", found->second->text, ")");
  }
}

FaultSchedule& faults() {
  static auto* instance = new FaultSchedule(settings().faults, settings().seed);
  return *instance;
}

}  // namespace rbln_sim
