/* SPDX-License-Identifier: Apache-2.0
 *
 * What librbln.so exports beside the symbols of the real one: for the simulated
 * compiler and for tests. Every function returns 0 on success; on failure it prints the
 * reason to stderr.
 */
#pragma once

#include <stdint.h>

#define RBLN_SIM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Where a compiled graph finds the device bytes [vaddr, vaddr + bytes).
 *
 * Makes the device copy of the whole allocation the newest (takes device memory, brings
 * host-latest bytes down to it) and gives its address in the simulator's own memory,
 * which stays valid until the allocation is freed. Fails as a copy of the range would,
 * and when the device is out of memory. */
RBLN_SIM_API int rbln_sim_device_view(uint64_t vaddr, uint64_t bytes,
                                      uint64_t* host_out);

/* A graph runs in stream order: wait until everything queued so far on the calling
 * thread's current stream of `device` is done. */
RBLN_SIM_API int rbln_sim_graph_begin(uint32_t device);

/* Base and size of the live allocation that holds `vaddr`. */
RBLN_SIM_API int rbln_sim_allocation(uint64_t vaddr, uint64_t* base, uint64_t* bytes);

/* Whether this process has opened `device`: 1 or 0 in `opened`. Opens nothing. */
RBLN_SIM_API int rbln_sim_device_opened(uint32_t device, uint32_t* opened);

/* Tell whether the runtime knows the newest bytes of the allocation at `vaddr`. After a
 * transfer behind its back (`known` 0), host copies and host views of the allocation
 * hold the byte 0xA5 until it is told of it (`known` 1), or the host writes to it. */
RBLN_SIM_API int rbln_sim_host_view_known(uint64_t vaddr, uint32_t known);

/* The graph that the calling thread began on `device` is done. */
RBLN_SIM_API int rbln_sim_graph_end(uint32_t device);

/* Check the RBLN_SIM_* settings and the visible NPUs without opening one. On failure
 * the reason is also stored in `reason`, cut to `capacity` bytes. */
RBLN_SIM_API int rbln_sim_check(char* reason, uint64_t capacity);

#ifdef __cplusplus
}
#endif
