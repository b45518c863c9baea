// SPDX-License-Identifier: Apache-2.0
//
// Allocations, their residency, and host memory lent to the caller.
#include <map>

#include "api/api.h"
#include "faults/faults.h"
#include "memory/memory.h"
#include "stream/operation.h"
#include "stream/stream.h"

using namespace rbln_sim;

namespace {

struct Loan {
  Range range;
  Span lent;
};

struct Loans {
  std::mutex mutex;
  std::map<uint64_t, Loan> by_id;
  uint64_t last_id = 0;
};

Loans& loans() {
  static Loans* instance = new Loans();
  return *instance;
}

void lend(uint64_t vaddr, uint64_t bytes, bool overwrite, uint64_t& host,
          uint64_t& id) {
  Range range = resolve(vaddr, bytes);
  const uint32_t device_id = range.allocation->device().id();
  drain_current_stream(device_id);
  Span lent;
  const auto borrow = [&](uint64_t) -> Operation::Crossing {
    const auto loan = range.allocation->borrow(range.offset, range.length, overwrite);
    lent = loan.span;
    return {loan.crossed ? bytes : 0, 1};
  };
  // Device bytes are lent as a copy, anything else without one.
  if (!overwrite && range.allocation->on_device()) {
    perform({Kind::kD2H, device_id, bytes, 1, true}, borrow);
  } else {
    borrow(1);
  }
  host = reinterpret_cast<uint64_t>(lent.bytes);
  Loans& all = loans();
  std::lock_guard<std::mutex> lock(all.mutex);
  id = ++all.last_id;
  all.by_id.emplace(id, Loan{std::move(range), std::move(lent)});
}

}  // namespace

namespace rbln {

RetCode rbln_malloc_lazy(uint32_t device_id, uint64_t size, uint64_t& vaddr) {
  return use(__func__, [&] {
    perform({Kind::kAlloc, device_id, size},
            [&](uint64_t) { vaddr = allocate(device(device_id), size); });
  });
}

RetCode rbln_malloc_eager(uint32_t device_id, uint64_t size, uint64_t& vaddr) {
  return use(__func__, [&] {
    perform({Kind::kAlloc, device_id, size}, [&](uint64_t) {
      const uint64_t base = allocate(device(device_id), size);
      try {
        resolve_base(base)->bind();
      } catch (...) {
        release(base);
        throw;
      }
      vaddr = base;
    });
  });
}

RetCode rbln_free(uint64_t vaddr) {
  return use(__func__, [&] { release(vaddr); });
}

RetCode rbln_mark_zeros(uint64_t vaddr) {
  return use(__func__, [&] {
    const auto allocation = resolve_base(vaddr);
    drain_current_stream(allocation->device().id());
    allocation->mark_zeros();
  });
}

RetCode rbln_set_raw_memory_alloc(uint64_t vaddr, uint64_t size) {
  return use(__func__, [&] {
    faults().refuse_lost(resolve(vaddr, size).allocation->device().id());
    resolve_base(vaddr)->bind();
  });
}

RetCode rbln_set_device_alloc_layout_like(uint64_t target, uint64_t reference) {
  return use(__func__, [&] {
    const auto adopting = resolve_base(target);
    const auto model = resolve_base(reference);
    if (&adopting->device() != &model->device()) {
      refuse(kInvalid, "the target is on rbln:", adopting->device().id(),
             ", the reference on rbln:", model->device().id());
    }
    if (!model->on_device()) {
      refuse(kInvalid, "the reference ", hex(reference), " is not in device memory");
    }
    faults().refuse_lost(adopting->device().id());
    // The only layout here is flat, so what is left of this call is that the target's
    // device memory exists.
    adopting->bind();
    const MemoryInfo layout = model->info();
    adopting->set_info(layout.user_dtype, layout.physical_dtype,
                       adopting->info().user_shape);
  });
}

RetCode rbln_set_memory_info(uint64_t vaddr, DataType user, DataType physical,
                             const std::vector<int64_t>& shape) {
  return use(__func__, [&] {
    for (const DataType type : {user, physical}) {
      if (type < DataType::Undefined || type > DataType::Complex128) {
        refuse(kInvalid, "there is no data type ", static_cast<int>(type));
      }
    }
    for (const int64_t extent : shape) {
      if (extent < 0) refuse(kInvalid, "the shape has a negative extent ", extent);
    }
    resolve(vaddr, 1).allocation->set_info(user, physical, shape);
  });
}

RetCode rbln_get_memory_info(uint64_t vaddr, MemoryInfo& info) {
  return use(__func__, [&] { info = resolve(vaddr, 1).allocation->info(); });
}

RetCode rbln_get_torch_device_id_from_vaddr(uint64_t vaddr, uint32_t& device_id) {
  return use(__func__,
             [&] { device_id = resolve(vaddr, 1).allocation->device().id(); });
}

RetCode rbln_v_borrow_host_ptr(uint64_t vaddr, uint64_t bytes, uint64_t& host,
                               uint64_t& id) {
  return use(__func__, [&] { lend(vaddr, bytes, false, host, id); });
}

RetCode rbln_v_acquire_host_ptr_for_overwrite(uint64_t vaddr, uint64_t bytes,
                                              uint64_t& host, uint64_t& id) {
  return use(__func__, [&] { lend(vaddr, bytes, true, host, id); });
}

RetCode rbln_v_return_borrowed(uint64_t id, bool updated) {
  return use(__func__, [&] {
    Loan loan;
    {
      Loans& all = loans();
      std::lock_guard<std::mutex> lock(all.mutex);
      const auto found = all.by_id.find(id);
      if (found == all.by_id.end()) {
        refuse(kInvalid, "nothing is lent under the id ", id);
      }
      loan = std::move(found->second);
      all.by_id.erase(found);
    }
    if (!updated) return;
    const Range& range = loan.range;
    const uint32_t device_id = range.allocation->device().id();
    drain_current_stream(device_id);
    const auto take_back = [&](uint64_t) -> Operation::Crossing {
      const bool crossed =
          range.allocation->take_back(range.offset, range.length, loan.lent);
      return {crossed ? range.length : 0, 1};
    };
    if (range.allocation->on_device()) {
      perform({Kind::kH2D, device_id, range.length, 1, true}, take_back);
    } else {
      take_back(1);
    }
  });
}

}  // namespace rbln
