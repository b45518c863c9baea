// SPDX-License-Identifier: Apache-2.0
#include "stream/cost.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "settings.h"

namespace rbln_sim {

bool Costs::any() const {
  return registered_d2h + registered_h2d + pageable_d2h + pageable_h2d + d2d +
             submission + descriptor >
         0;
}

double Costs::link_time(Kind kind, bool registered, uint64_t bytes,
                        uint64_t descriptors) const {
  double speed = d2d;
  if (kind == Kind::kD2H) speed = registered ? registered_d2h : pageable_d2h;
  if (kind == Kind::kH2D) speed = registered ? registered_h2d : pageable_h2d;
  const double transfer = speed > 0 ? static_cast<double>(bytes) / speed : 0;
  // The figure known is that of descriptors on the host's link.
  if (kind == Kind::kD2D) return transfer;
  return transfer + static_cast<double>(descriptors) * descriptor;
}

int64_t end_of_copy(Kind kind, uint32_t device, bool registered, uint64_t bytes,
                    uint64_t descriptors, int64_t begin) {
  static std::mutex mutex;
  static auto* free_at = new std::map<std::pair<uint32_t, Kind>, int64_t>();
  const Costs& costs = settings().costs;
  const auto taken =
      static_cast<int64_t>(costs.link_time(kind, registered, bytes, descriptors));
  const int64_t ready = begin + static_cast<int64_t>(costs.submission);
  std::lock_guard<std::mutex> lock(mutex);
  int64_t& link = (*free_at)[{device, kind}];
  link = std::max(link, ready) + taken;
  return link;
}

}  // namespace rbln_sim
