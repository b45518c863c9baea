// SPDX-License-Identifier: Apache-2.0
#include "memory/memory.h"

#include <deque>
#include <map>
#include <shared_mutex>
#include <string>

#include "memory/space.h"
#include "refusal.h"

namespace rbln_sim {
namespace {

// Freed ranges remembered, so that a stale address can be told from a foreign one.
constexpr size_t kRemembered = 4096;

struct Table {
  std::shared_mutex mutex;
  std::map<uint64_t, std::shared_ptr<Allocation>> live;
  std::map<uint64_t, uint64_t> freed;  // base -> size
  std::deque<uint64_t> freed_order;
};

Table& table() {
  static Table* instance = new Table();
  return *instance;
}

std::string describe(uint64_t base, uint64_t size) {
  return "[" + hex(base) + ", +" + std::to_string(size) + " bytes]";
}

// What an address without a live allocation is. The table is locked by the caller.
std::string describe_dead(const Table& all, uint64_t address) {
  const auto next = all.freed.upper_bound(address);
  if (next != all.freed.begin()) {
    const auto& [base, size] = *std::prev(next);
    if (address - base < size) {
      return hex(address) + " is stale: its allocation " + describe(base, size) +
             " was freed";
    }
  }
  if (AddressSpace::instance().contains(address)) {
    return hex(address) + " is in no live allocation";
  }
  return hex(address) + " is not a device address";
}

}  // namespace

uint64_t allocate(Device& device, uint64_t size) {
  if (size == 0) refuse(kInvalid, "an allocation of 0 bytes was asked for");
  const uint64_t base = AddressSpace::instance().take(size);
  auto allocation = std::make_shared<Allocation>(device, base, size);
  Table& all = table();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  all.live.emplace(base, std::move(allocation));
  if (all.freed.erase(base) != 0) {
    for (auto it = all.freed_order.begin(); it != all.freed_order.end(); ++it) {
      if (*it == base) {
        all.freed_order.erase(it);
        break;
      }
    }
  }
  return base;
}

void release(uint64_t base) {
  // Destroyed after the lock is gone: giving memory back takes time.
  std::shared_ptr<Allocation> dead;
  Table& all = table();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  const auto found = all.live.find(base);
  if (found == all.live.end()) {
    const auto next = all.live.upper_bound(base);
    if (next != all.live.begin()) {
      const Allocation& before = *std::prev(next)->second;
      if (base - before.base() < before.size()) {
        refuse(kInvalid, hex(base), " is inside the allocation ",
               describe(before.base(), before.size()), ", not its start");
      }
    }
    refuse(kInvalid, describe_dead(all, base));
  }
  dead = std::move(found->second);
  all.live.erase(found);
  all.freed[base] = dead->size();
  all.freed_order.push_back(base);
  if (all.freed_order.size() > kRemembered) {
    all.freed.erase(all.freed_order.front());
    all.freed_order.pop_front();
  }
  lock.unlock();
}

Range resolve(uint64_t address, uint64_t length) {
  Table& all = table();
  std::shared_lock<std::shared_mutex> lock(all.mutex);
  const auto next = all.live.upper_bound(address);
  if (next != all.live.begin()) {
    const std::shared_ptr<Allocation>& found = std::prev(next)->second;
    const uint64_t offset = address - found->base();
    if (offset < found->size()) {
      if (length > found->size() - offset) {
        refuse(kInvalid, length, " bytes at ", hex(address), " (offset ", offset,
               ") run past the end of the allocation ",
               describe(found->base(), found->size()));
      }
      return {found, offset, length};
    }
  }
  refuse(kInvalid, describe_dead(all, address), " (", length, " bytes asked for)");
}

std::shared_ptr<Allocation> resolve_base(uint64_t address) {
  Range range = resolve(address, 1);
  if (range.offset != 0) {
    refuse(kInvalid, hex(address), " is inside the allocation ",
           describe(range.allocation->base(), range.allocation->size()),
           ", not its start");
  }
  return range.allocation;
}

char* host_pointer(uint64_t pointer, uint64_t length) {
  if (pointer == 0) refuse(kInvalid, "the host pointer is null");
  if (length > UINT64_MAX - pointer) {
    refuse(kInvalid, length, " bytes at the host pointer ", hex(pointer),
           " run past the end of all memory");
  }
  const AddressSpace& space = AddressSpace::instance();
  if (space.contains(pointer) || space.contains(pointer + length - 1)) {
    refuse(kInvalid, hex(pointer),
           " is a device address where a host pointer is wanted");
  }
  return reinterpret_cast<char*>(pointer);
}

}  // namespace rbln_sim
