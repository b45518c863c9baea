// SPDX-License-Identifier: Apache-2.0
#include "faults/rules.h"

#include <array>
#include <cerrno>
#include <cstdlib>

#include "refusal.h"

namespace rbln_sim {
namespace {

using Action = FaultRule::Action;

constexpr std::array<const char*, kKinds> kNames = {"d2h",   "h2d",  "d2d",
                                                    "graph", "sync", "alloc"};
constexpr uint64_t kMaxNumber = 1'000'000'000'000;
constexpr char kSticky[] = "+sticky";

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// One rule while it is read.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) { rule_.text = text; }

  FaultRule read() {
    std::string rest = text_;
    const size_t mark = rest.find('+');
    if (mark != std::string::npos) {
      if (rest.substr(mark) != kSticky) bad("'+' begins '+sticky', at the end");
      rule_.sticky = true;
      rest.resize(mark);
    }
    fields_ = split(rest, ':');
    rule_.action = action();
    if (rule_.action == Action::kLost) {
      if (rule_.sticky) bad("a lost device is lost for good, without '+sticky'");
      want_fields(3, 3);
      const uint64_t device = number(fields_[1], 0, "a device");
      if (device > UINT32_MAX) bad("there is no device " + fields_[1]);
      rule_.device = static_cast<uint32_t>(device);
      rule_.position = number(fields_[2], 0, "a number of operations");
      return rule_;
    }
    const bool waits = rule_.action == Action::kDelay || rule_.action == Action::kHang;
    want_fields(rule_.action == Action::kDelay ? 4 : 3, waits ? 4 : 3);
    kind();
    when();
    if (fields_.size() == 4) time();
    return rule_;
  }

 private:
  [[noreturn]] void bad(const std::string& why) const {
    refuse(kInvalid, "RBLN_SIM_FAULTS: cannot read the rule '", text_, "': ", why,
           "; rules look like fail:h2d:3, delay:d2h:5:20ms, hang:sync:1, "
           "oom:alloc:10+sticky, fail:any:p=0.01 or lost:0:25");
  }

  void want_fields(size_t least, size_t most) const {
    if (fields_.size() < least || fields_.size() > most) {
      bad("it has " + std::to_string(fields_.size()) + " fields");
    }
  }

  Action action() const {
    const std::string& name = fields_[0];
    if (name == "fail") return Action::kFail;
    if (name == "delay") return Action::kDelay;
    if (name == "hang") return Action::kHang;
    if (name == "oom") return Action::kOom;
    if (name == "lost") return Action::kLost;
    bad("there is no action '" + name + "'");
  }

  void kind() {
    const std::string& name = fields_[1];
    for (unsigned i = 0; i < kKinds; ++i) {
      if (name == kNames[i]) rule_.kind = static_cast<Kind>(i);
    }
    if (!rule_.kind && name != "any") bad("there is no kind '" + name + "'");
    if (rule_.action == Action::kOom && rule_.kind != Kind::kAlloc) {
      bad("only alloc runs out of memory");
    }
  }

  void when() {
    const std::string& value = fields_[2];
    if (value.rfind("p=", 0) != 0) {
      rule_.position = number(value, 1, "a position");
      return;
    }
    const std::string digits = value.substr(2);
    if (digits.find_first_not_of("0123456789.") == std::string::npos) {
      char* end = nullptr;
      rule_.probability = std::strtod(digits.c_str(), &end);
      if (!digits.empty() && *end == '\0' && rule_.probability > 0 &&
          rule_.probability <= 1) {
        return;
      }
    }
    bad("'" + digits + "' is not a probability above 0 and up to 1");
  }

  void time() {
    const std::string& value = fields_[3];
    const size_t unit_at = value.find_first_not_of("0123456789");
    const std::string unit = unit_at == std::string::npos ? "" : value.substr(unit_at);
    const uint64_t scale = unit == "us"   ? 1
                           : unit == "ms" ? 1000
                           : unit == "s"  ? 1'000'000
                                          : 0;
    if (scale == 0) bad("'" + value + "' is not a time with us, ms or s");
    const uint64_t count = number(value.substr(0, unit_at), 1, "a time");
    if (count > kMaxNumber / scale) bad("'" + value + "' is more than 10^12 us");
    rule_.time = std::chrono::microseconds(count * scale);
  }

  uint64_t number(const std::string& digits, uint64_t low, const char* what) const {
    const bool whole = !digits.empty() && digits.size() <= 13 &&
                       digits.find_first_not_of("0123456789") == std::string::npos;
    const uint64_t value = whole ? std::strtoull(digits.c_str(), nullptr, 10) : 0;
    if (!whole || value < low || value > kMaxNumber) {
      bad("'" + digits + "' is not " + what + " of at least " + std::to_string(low));
    }
    return value;
  }

  const std::string text_;
  std::vector<std::string> fields_;
  FaultRule rule_;
};

}  // namespace

std::vector<FaultRule> parse_faults(const std::string& text) {
  std::vector<FaultRule> rules;
  if (text.empty()) return rules;
  for (const std::string& rule : split(text, ',')) rules.push_back(Reader(rule).read());
  return rules;
}

const char* fault_name(Kind kind) { return kNames[static_cast<unsigned>(kind)]; }

}  // namespace rbln_sim
