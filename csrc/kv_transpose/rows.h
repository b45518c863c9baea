// SPDX-License-Identifier: Apache-2.0
//
// Copying rows of bytes, past the cache where that helps.
#pragma once

#include <cstdint>
#include <cstring>

// Tests build the portable version on x86-64 too.
#if defined(__SSE2__) && !defined(KV_TRANSPOSE_PORTABLE)
#define KV_TRANSPOSE_SSE2
#include <emmintrin.h>
#endif

namespace kv_transpose {

/// Whether stores past the cache exist here; if not, stream_row is an ordinary copy.
#if defined(KV_TRANSPOSE_SSE2)
constexpr bool kStreams = true;
#else
constexpr bool kStreams = false;
#endif

/// Streaming stores want destination and length to be multiples of this.
constexpr int64_t kStreamAlignment = 16;

inline void copy_row(char* to, const char* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

/// How far ahead short rows are fetched; what reads on is fetched by the processor, but
/// not from the next page.
constexpr int64_t kAheadBytes = 1024;
constexpr int64_t kLineBytes = 64;

/// Asks for a row's worth of bytes that lie ahead of it and will be read once.
inline void fetch_ahead(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLineBytes) {
    constexpr int kRead = 0;
    constexpr int kOnce = 0;
    __builtin_prefetch(from + kAheadBytes + at, kRead, kOnce);
  }
}

/// Copies a row without reading the lines it writes into the cache: for destinations
/// that nobody reads soon. Needs end_stream() before another thread may read them.
inline void stream_row(char* to, const char* from, int64_t bytes) {
#if defined(KV_TRANSPOSE_SSE2)
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  for (; at < bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
#else
  copy_row(to, from, bytes);
#endif
}

inline void end_stream() {
#if defined(KV_TRANSPOSE_SSE2)
  _mm_sfence();
#endif
}

}  // namespace kv_transpose
