// SPDX-License-Identifier: Apache-2.0
//
// The binary interface that torch-rbln 0.12.0 links against (ABI number 6).
//
// Struct layouts were read from the code that uses them: torch-rbln's public headers of
// an earlier release and the accesses in the 0.12.0 wheel. The static_asserts pin them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#define RBLN_ABI __attribute__((visibility("default")))

constexpr uint32_t kAbiCurrent = 6;
constexpr uint32_t kAbiMinSupported = 6;

/// Return codes of every call that reports success or failure.
enum RetCode : int { kSuccess = 0, kFailure = 1, kInvalid = 2 };

constexpr unsigned kMaxChiplets = 8;

/// What `rbln_get_device_properties` fills for one NPU.
struct RBLNDeviceProperties {
  char name[16];
  uint64_t total_memory;
  uint64_t memory_per_chiplet;
  uint32_t chiplets;
};
static_assert(sizeof(RBLNDeviceProperties) == 40);
static_assert(offsetof(RBLNDeviceProperties, total_memory) == 16);
static_assert(offsetof(RBLNDeviceProperties, chiplets) == 32);

struct RBLNChipletMemory {
  uint64_t total;
  uint64_t used;
  uint64_t free;
  uint64_t largest_free;
  uint64_t largest_free_huge;
};

/// What `rbln_get_device_memory_info` fills for one NPU.
struct RBLNDeviceMemoryInfo {
  uint64_t total;
  uint64_t used;
  uint64_t free;
  uint64_t huge_granularity;
  uint32_t granularity;
  uint32_t chiplets;
  RBLNChipletMemory chiplet[kMaxChiplets];
};
static_assert(sizeof(RBLNDeviceMemoryInfo) == 0x168);
static_assert(offsetof(RBLNDeviceMemoryInfo, chiplet) == 40);

struct rccl_extra_args;

namespace rbln_sim {
class Peers;
}

/// Written by rank 0 and broadcast to the other ranks.
struct rccl_unique_id {
  char root_address[16];
  char self_address[16];
  char self_rdma_address[16];
  int32_t root_port;
  int32_t rdma_base_port;
};
static_assert(sizeof(rccl_unique_id) == 0x38);

namespace rbln {

enum class DataType {
  Undefined,
  Bool,
  UInt8,
  Int8,
  Int16,
  Int32,
  Int64,
  Float16,
  Float32,
  Float64,
  Float8_e4m3,
  Float8_e5m2,
  BFloat16,
  CustomFloat16,
  Complex32,
  Complex64,
  Complex128,
};

struct MemoryInfo {
  uint32_t torch_device_id;
  uint64_t key_vaddr;
  DataType user_dtype;
  std::vector<int64_t> user_shape;
  DataType physical_dtype;
  std::vector<int64_t> physical_shape;
};
static_assert(sizeof(MemoryInfo) == 80);
static_assert(offsetof(MemoryInfo, user_shape) == 24);
static_assert(offsetof(MemoryInfo, physical_shape) == 56);

/// Allocator statistics of one device or chiplet; returned by value, so callers hold
/// its size: sixteen counters in this order.
class MemoryStats {
 public:
  RBLN_ABI uint64_t GetAllocatedCurrent() const;
  RBLN_ABI uint64_t GetAllocatedPeak() const;
  RBLN_ABI uint64_t GetAllocatedTotalAllocated() const;
  RBLN_ABI uint64_t GetAllocatedTotalFreed() const;
  RBLN_ABI uint64_t GetReservedCurrent() const;
  RBLN_ABI uint64_t GetReservedPeak() const;
  RBLN_ABI uint64_t GetReservedTotalAllocated() const;
  RBLN_ABI uint64_t GetReservedTotalFreed() const;
  RBLN_ABI uint64_t GetActiveCurrent() const;
  RBLN_ABI uint64_t GetActivePeak() const;
  RBLN_ABI uint64_t GetCachedCurrent() const;
  RBLN_ABI uint64_t GetCachedPeak() const;
  RBLN_ABI uint64_t GetNumAllocRetries() const;
  RBLN_ABI uint64_t GetNumOoms() const;
  RBLN_ABI uint64_t GetNumDeviceAlloc() const;
  RBLN_ABI uint64_t GetNumDeviceFree() const;
  RBLN_ABI std::map<std::string, uint64_t> GetMemoryStats() const;

  struct Group {
    uint64_t current = 0;
    uint64_t peak = 0;
    uint64_t total_allocated = 0;
    uint64_t total_freed = 0;
  };
  Group allocated;
  Group reserved;
  uint64_t active_current = 0;
  uint64_t active_peak = 0;
  uint64_t cached_current = 0;
  uint64_t cached_peak = 0;
  uint64_t num_alloc_retries = 0;
  uint64_t num_ooms = 0;
  uint64_t num_device_alloc = 0;
  uint64_t num_device_free = 0;
};
static_assert(sizeof(MemoryStats) == 128);

/// Collectives. torch-rbln allocates 64 bytes for one and calls the constructor.
class Rccl {
 public:
  enum class RcclDataType : int {};
  enum class RcclReduceOp : int {};

  RBLN_ABI Rccl();
  RBLN_ABI ~Rccl();
  RBLN_ABI RetCode Init(int rank, int size, int group, const std::vector<int>& ranks,
                        int torch_device);
  RBLN_ABI RetCode InitWithUniqueId(int rank, int size, int group,
                                    const std::vector<int>& ranks, int torch_device,
                                    const rccl_unique_id* id);
  RBLN_ABI RetCode GetUniqueIdForBroadcast(rccl_unique_id* out);
  RBLN_ABI RetCode PrepareContextAndExportMem(int torch_device);
  RBLN_ABI RetCode Send(void* data, int count, RcclDataType type, int peer,
                        rccl_extra_args* extra);
  RBLN_ABI RetCode Recv(void* data, int count, RcclDataType type, int peer,
                        rccl_extra_args* extra);
  RBLN_ABI RetCode Broadcast(void* in, void* out, int count, RcclDataType type,
                             int root, rccl_extra_args* extra);
  RBLN_ABI RetCode AllGather(void* in, const std::vector<void*>& out, int count,
                             RcclDataType type, int root, rccl_extra_args* extra);
  RBLN_ABI RetCode AllReduce(void* in, void* out, int count, RcclDataType type,
                             RcclReduceOp op, int root, rccl_extra_args* extra);
  RBLN_ABI RetCode Scatter(const std::vector<void*>& in, void* out, int count,
                           RcclDataType type, int root, rccl_extra_args* extra);
  RBLN_ABI RetCode ReduceScatter(const std::vector<void*>& in, void* out, int count,
                                 RcclDataType type, RcclReduceOp op, int root,
                                 rccl_extra_args* extra);
  RBLN_ABI RetCode CheckChunksDeviceAddrsContiguous(const std::vector<void*>& chunks,
                                                    int count, RcclDataType type,
                                                    const char* operation);

 private:
  // Of the simulator; none before a group of several ranks is set up.
  std::unique_ptr<rbln_sim::Peers> peers_;
};
static_assert(sizeof(Rccl) <= 64);

/// (source, destination, bytes)
using CopyEntry = std::tuple<uint64_t, uint64_t, uint64_t>;

RBLN_ABI RetCode rbln_malloc_eager(uint32_t device, uint64_t size, uint64_t& vaddr);
RBLN_ABI RetCode rbln_malloc_lazy(uint32_t device, uint64_t size, uint64_t& vaddr);
RBLN_ABI RetCode rbln_free(uint64_t vaddr);
RBLN_ABI RetCode rbln_mark_zeros(uint64_t vaddr);
RBLN_ABI RetCode rbln_set_raw_memory_alloc(uint64_t vaddr, uint64_t size);
RBLN_ABI RetCode rbln_set_device_alloc_layout_like(uint64_t target, uint64_t reference);
RBLN_ABI RetCode rbln_set_memory_info(uint64_t vaddr, DataType user, DataType physical,
                                      const std::vector<int64_t>& shape);
RBLN_ABI RetCode rbln_get_memory_info(uint64_t vaddr, MemoryInfo& out);
RBLN_ABI RetCode rbln_get_torch_device_id_from_vaddr(uint64_t vaddr, uint32_t& device);

RBLN_ABI RetCode rbln_memcpy_h2v(uint64_t src, uint64_t dst, uint64_t bytes);
RBLN_ABI RetCode rbln_memcpy_v2h(uint64_t src, uint64_t dst, uint64_t bytes);
RBLN_ABI RetCode rbln_memcpy_v2v(uint64_t src, uint64_t dst, uint64_t bytes);
RBLN_ABI RetCode rbln_memcpy_h2v_async(uint64_t src, uint64_t dst, uint64_t bytes,
                                       uint64_t* handle);
RBLN_ABI RetCode rbln_memcpy_v2h_async(uint64_t src, uint64_t dst, uint64_t bytes,
                                       uint64_t* handle);
RBLN_ABI RetCode rbln_memcpy_v2v_async(uint64_t src, uint64_t dst, uint64_t bytes,
                                       uint64_t* handle);
RBLN_ABI RetCode rbln_memcpy_h2v_multi(const std::vector<CopyEntry>& entries);
RBLN_ABI RetCode rbln_memcpy_v2h_multi(const std::vector<CopyEntry>& entries);
RBLN_ABI RetCode rbln_memcpy_v2v_multi(const std::vector<CopyEntry>& entries);

RBLN_ABI RetCode rbln_v_borrow_host_ptr(uint64_t vaddr, uint64_t bytes, uint64_t& host,
                                        uint64_t& id);
RBLN_ABI RetCode rbln_v_acquire_host_ptr_for_overwrite(uint64_t vaddr, uint64_t bytes,
                                                       uint64_t& host, uint64_t& id);
RBLN_ABI RetCode rbln_v_return_borrowed(uint64_t id, bool updated);

RBLN_ABI RetCode rbln_device_synchronize(uint32_t device);
RBLN_ABI RetCode rbln_stream_create(uint32_t device, uint64_t* stream);
RBLN_ABI RetCode rbln_stream_query(uint64_t stream, bool* done);
RBLN_ABI RetCode rbln_stream_synchronize(uint64_t stream);
RBLN_ABI RetCode rbln_stream_wait_event(uint64_t stream, uint64_t event);
RBLN_ABI RetCode rbln_get_current_stream(uint32_t device, uint64_t* stream);
RBLN_ABI RetCode rbln_set_current_stream(uint32_t device, uint64_t stream);
RBLN_ABI RetCode rbln_event_create(uint32_t device, uint64_t* event);
RBLN_ABI RetCode rbln_event_destroy(uint64_t event);
RBLN_ABI RetCode rbln_event_record(uint64_t event, uint64_t stream);
RBLN_ABI RetCode rbln_event_query(uint64_t event, bool* done);
RBLN_ABI RetCode rbln_event_synchronize(uint64_t event);

RBLN_ABI RetCode rbln_set_file_offloading_enabled(bool enabled);
RBLN_ABI RetCode rbln_release_offload_temp_storage(uint64_t* removed);

}  // namespace rbln

RBLN_ABI rbln::MemoryStats rbln_get_memory_stats(int torch_device);
/// Outer index: NPU of the logical device; inner index: chiplet.
RBLN_ABI std::vector<std::vector<rbln::MemoryStats>> rbln_get_memory_stats_per_chiplet(
    int torch_device);

extern "C" {
RBLN_ABI uint32_t rbln_abi_current();
RBLN_ABI uint32_t rbln_abi_min_supported();
RBLN_ABI bool rbln_runtime_available();
RBLN_ABI RetCode rbln_get_device_count(int* count);
RBLN_ABI RetCode rbln_register_device_id(int torch_device, int* npus, int count);
RBLN_ABI RetCode rbln_get_device_properties(int npu, RBLNDeviceProperties* out);
RBLN_ABI RetCode rbln_get_device_memory_info(int npu, RBLNDeviceMemoryInfo* out);
RBLN_ABI RetCode rbln_empty_cache(int torch_device);
RBLN_ABI RetCode rbln_reset_accumulated_memory_stats(int torch_device);
RBLN_ABI RetCode rbln_reset_peak_memory_stats(int torch_device);

RBLN_ABI uint32_t rbln_prof_v2v_hidden_num_reasons();
RBLN_ABI uint32_t rbln_prof_v2v_reject_num_reasons();
RBLN_ABI void rbln_prof_get_v2v_hidden_d2h(uint64_t* counts, uint64_t* bytes,
                                           uint32_t n);
RBLN_ABI void rbln_prof_get_v2v_reject(uint64_t* counts, uint64_t* bytes, uint32_t n);
RBLN_ABI void rbln_prof_get_host_sync_d2h(uint64_t* count, uint64_t* bytes);
RBLN_ABI void rbln_prof_get_host_sync_h2d(uint64_t* count, uint64_t* bytes);
RBLN_ABI void rbln_prof_get_memory(uint64_t* current, uint64_t* peak);
RBLN_ABI void rbln_prof_reset_v2v_hidden_d2h();
RBLN_ABI void rbln_prof_reset_v2v_reject();
RBLN_ABI void rbln_prof_reset_host_sync_d2h();
RBLN_ABI void rbln_prof_reset_host_sync_h2d();

RBLN_ABI RetCode rbln_kineto_is_active(int* active);
RBLN_ABI RetCode rbln_kineto_begin_session();
RBLN_ABI RetCode rbln_kineto_end_session_and_export(void* sink, void* context,
                                                    int* dropped);
RBLN_ABI RetCode rbln_rt_prepare_inputs(void* runtime, const void* indices,
                                        const void* data, uint32_t count);
RBLN_ABI RetCode rbln_rt_prepare_outputs(void* runtime, const void* indices,
                                         const void* data, uint32_t count);
RBLN_ABI RetCode rbln_rt_run(void* runtime);
}
