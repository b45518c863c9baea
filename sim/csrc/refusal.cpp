// SPDX-License-Identifier: Apache-2.0
#include "refusal.h"

#include <unistd.h>

#include <new>

namespace rbln_sim {

std::string hex(uint64_t value) {
  std::ostringstream text;
  text << "0x" << std::hex << value;
  return text.str();
}

void report(const char* function, const std::string& message) {
  const std::string line =
      "[rbln-sim] " + std::string(function) + ": " + message + "\n";
  // A failed write to stderr leaves nowhere to report to.
  (void)!write(STDERR_FILENO, line.data(), line.size());
}

RetCode report_current_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const Refusal& refusal) {
    report(function, refusal.what());
    return refusal.code();
  } catch (const std::bad_alloc&) {
    report(function, "the host is out of memory");
  } catch (const std::exception& error) {
    report(function, error.what());
  }
  return kFailure;
}

}  // namespace rbln_sim
