// SPDX-License-Identifier: Apache-2.0
//
// How a call fails: code deep inside throws a Refusal, the exported function turns it
// into one line on stderr and a return code. Callers of the library only see the code,
// as on the real runtime, whose log holds the detail.
#pragma once

#include <exception>
#include <sstream>
#include <string>

#include "api/abi.h"

namespace rbln_sim {

class Refusal : public std::exception {
 public:
  Refusal(RetCode code, std::string message)
      : code_(code), message_(std::move(message)) {}
  RetCode code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  RetCode code_;
  std::string message_;
};

/// Throw a Refusal whose message is the concatenation of `parts`.
template <typename... Parts>
[[noreturn]] void refuse(RetCode code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Refusal(code, text.str());
}

/// `value` as 0x-prefixed hexadecimal text.
std::string hex(uint64_t value);

/// Print one line "[rbln-sim] FUNCTION: MESSAGE" to stderr (one write, so that lines of
/// several threads or processes do not mix).
void report(const char* function, const std::string& message);

/// The current exception as a return code, after reporting it. Call from a catch block.
RetCode report_current_exception(const char* function) noexcept;

/// Run `body`; success, or the return code of what it threw.
template <typename Body>
RetCode guarded(const char* function, Body&& body) noexcept {
  try {
    body();
    return kSuccess;
  } catch (...) {
    return report_current_exception(function);
  }
}

}  // namespace rbln_sim
