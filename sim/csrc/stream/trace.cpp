// SPDX-License-Identifier: Apache-2.0
#include "stream/trace.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "refusal.h"
#include "settings.h"

namespace rbln_sim {
namespace {

// As the reader, rbln_sim.trace, knows them; allocations are not traced.
const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kD2H:
      return "d2h";
    case Kind::kH2D:
      return "h2d";
    case Kind::kD2D:
      return "d2d";
    case Kind::kGraph:
      return "graph";
    case Kind::kSync:
      return "wait";
    case Kind::kAlloc:
      break;
  }
  return nullptr;
}

// As a JSON value; what copies nothing went no way.
const char* way_of(const TraceLine& line) {
  if (line.descriptors == 0) return "null";
  switch (line.via) {
    case Via::kLink:
      return "\"link\"";
    case Via::kHost:
      return "\"host\"";
    case Via::kHidden:
      break;
  }
  return "\"hidden\"";
}

int trace_file() {
  // Without a lock once it is open: a process may be forked while another thread holds
  // one.
  static std::atomic<int> file{-1};
  const int opened = file.load(std::memory_order_acquire);
  if (opened >= 0) return opened;
  const std::string& path = settings().trace;
  const int mine = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (mine < 0) {
    refuse(kFailure, "cannot open RBLN_SIM_TRACE='", path, "': ", std::strerror(errno));
  }
  int others = -1;
  if (file.compare_exchange_strong(others, mine)) return mine;
  close(mine);
  return others;
}

}  // namespace

bool traced(Kind kind) {
  if (settings().trace.empty() || name_of(kind) == nullptr) return false;
  trace_file();
  return true;
}

void write_trace(const TraceLine& line) {
  char stream[16] = "null";
  if (line.stream) snprintf(stream, sizeof stream, "%" PRIu32, *line.stream);
  char text[384];
  const int length =
      snprintf(text, sizeof text,
               "{\"pid\": %d, \"thread\": %d, \"kind\": \"%s\", \"bytes\": %" PRIu64
               ", \"descriptors\": %" PRIu64 ", \"device\": %" PRIu32
               ", \"stream\": %s, \"via\": %s, \"begin\": %" PRId64
               ", \"end\": %" PRId64 ", \"failed\": %s}\n",
               static_cast<int>(getpid()), line.thread, name_of(line.kind), line.bytes,
               line.descriptors, line.device, stream, way_of(line), line.begin,
               line.end, line.failed ? "true" : "false");
  if (write(trace_file(), text, static_cast<size_t>(length)) != length) {
    report("RBLN_SIM_TRACE",
           std::string("a line was not written: ") + std::strerror(errno));
  }
}

int thread_number() {
  static thread_local const int number = static_cast<int>(syscall(SYS_gettid));
  return number;
}

}  // namespace rbln_sim
