// SPDX-License-Identifier: Apache-2.0
#include "device/peers.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "refusal.h"
#include "settings.h"

namespace rbln_sim {
namespace {

// A process that ended while it was written to must not end this one.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigpipe() {
    if (!sigismember(&before_, SIGPIPE)) {
      const timespec now{};
      sigtimedwait(&pipe_, nullptr, &now);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_;
  sigset_t before_;
};

int open_pipe(const std::string& path, int flags) {
  if (mkfifo(path.c_str(), 0600) != 0 && errno != EEXIST) {
    refuse(kFailure, "cannot make ", path, ": ", std::strerror(errno));
  }
  int file;
  do {
    file = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW);
  } while (file < 0 && errno == EINTR);
  if (file < 0) refuse(kFailure, "cannot open ", path, ": ", std::strerror(errno));
  return file;
}

void write_all(int file, const char* bytes, uint64_t length, int peer) {
  const WithoutSigpipe guard;
  while (length > 0) {
    const ssize_t done = write(file, bytes, length);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) refuse(kFailure, "rank ", peer, " has ended");
    bytes += done;
    length -= static_cast<uint64_t>(done);
  }
}

void read_all(int file, char* bytes, uint64_t length, int peer) {
  while (length > 0) {
    const ssize_t done = read(file, bytes, length);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) refuse(kFailure, "rank ", peer, " has ended");
    bytes += done;
    length -= static_cast<uint64_t>(done);
  }
}

}  // namespace

Peers::Peers(std::string group, int rank, int size)
    : group_(std::move(group)), rank_(rank), size_(size) {}

Peers::~Peers() {
  for (const Direction* direction : {&out_, &in_}) {
    for (const auto& [peer, file] : direction->files) close(file);
  }
}

void Peers::check(int peer) const {
  if (peer < 0 || peer >= size_ || peer == rank_) {
    refuse(kInvalid, "rank ", peer, " is none of the others in a group of ", size_,
           " with this one as rank ", rank_);
  }
}

std::string Peers::path(int from, int to) const {
  return settings().state_dir + "/rccl-" + group_ + "-" + std::to_string(from) + "-" +
         std::to_string(to);
}

void Peers::send(int peer, const char* bytes, uint64_t length) {
  check(peer);
  const std::lock_guard<std::mutex> lock(out_.mutex);
  auto found = out_.files.find(peer);
  if (found == out_.files.end()) {
    const int file = open_pipe(path(rank_, peer), O_WRONLY);
    found = out_.files.emplace(peer, file).first;
  }
  write_all(found->second, reinterpret_cast<const char*>(&length), sizeof length, peer);
  write_all(found->second, bytes, length, peer);
}

void Peers::receive(int peer, char* bytes, uint64_t length) {
  check(peer);
  const std::lock_guard<std::mutex> lock(in_.mutex);
  auto found = in_.files.find(peer);
  if (found == in_.files.end()) {
    const std::string name = path(peer, rank_);
    const int file = open_pipe(name, O_RDONLY);
    // Both sides have it open: its name is of no more use.
    unlink(name.c_str());
    found = in_.files.emplace(peer, file).first;
  }
  uint64_t sent = 0;
  read_all(found->second, reinterpret_cast<char*>(&sent), sizeof sent, peer);
  if (sent != length) {
    refuse(kInvalid, "rank ", peer, " sent ", sent, " bytes, ", length, " were wanted");
  }
  read_all(found->second, bytes, length, peer);
}

}  // namespace rbln_sim
