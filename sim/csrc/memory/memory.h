// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "memory/allocation.h"

namespace rbln_sim {

/// A checked range of a live allocation.
struct Range {
  std::shared_ptr<Allocation> allocation;
  uint64_t offset = 0;
  uint64_t length = 0;
};

/// Make an allocation and return its address. No memory is taken until it is used.
uint64_t allocate(Device& device, uint64_t size);

/// Forget the allocation at `base`: the address is stale at once, the memory goes when
/// the last queued operation that uses it is done.
/// Throws Refusal for anything but the base address of a live allocation.
void release(uint64_t base);

/// The live allocation that holds all of [address, address + length).
/// Throws Refusal that says what the address is instead: a foreign pointer, freed, or
/// overrunning.
Range resolve(uint64_t address, uint64_t length);

/// `resolve`, and the address must be the allocation's base.
std::shared_ptr<Allocation> resolve_base(uint64_t address);

/// Throws Refusal if `pointer` is null or a device address.
char* host_pointer(uint64_t pointer, uint64_t length);

}  // namespace rbln_sim
