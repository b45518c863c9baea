// SPDX-License-Identifier: Apache-2.0
#include "counters.h"

namespace rbln_sim {

Counters& counters() {
  static Counters* instance = new Counters();
  return *instance;
}

}  // namespace rbln_sim
