// What is the digest of a piece of memory?
//
// Two 64-bit sums over its 64-bit words. Every word is first mixed with its
// position, so that moved words count as changed.
//   first:  a bijection of the word for each position. A change that is confined
//           to one aligned word always changes the sum.
//   second: a product of the word's halves, keyed otherwise. It is independent
//           of the first, so that a change of several words goes unseen only if
//           both sums collide: about 2^-128 for changes made without knowledge
//           of the digest. It is no defence against somebody who wants to
//           collide it.
// cumem/digest.cu computes the same on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cumem {

struct Digest {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  bool operator==(const Digest& other) const noexcept {
    return first == other.first && second == other.second;
  }
  bool operator!=(const Digest& other) const noexcept { return !(*this == other); }
};

// A piece as the GPU's kernel reads it. pre: address is a multiple of 16.
struct DigestPiece {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

// The most that one digest stands for: a change costs a copy of this much.
constexpr std::size_t kDigestBytes = std::size_t{2} << 20;

namespace digest_detail {

// Odd constants: the golden ratio and primes of xxHash64 (Collet, BSD licence).
constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15U;
constexpr std::uint64_t kMix1 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kMix2 = 0x165667B19E3779F9U;
constexpr std::uint64_t kOther = 0x85EBCA77C2B2AE63U;

inline void add(std::uint64_t word, std::uint64_t index, Digest& sum) noexcept {
  std::uint64_t mixed = (word ^ (index * kStep)) * kMix1;
  mixed = (mixed ^ (mixed >> 32)) * kMix2;
  sum.first += mixed;
  const std::uint64_t keyed = word + (index + 1) * kOther;
  sum.second += (keyed & 0xFFFFFFFFU) * (keyed >> 32) + (keyed << 17 | keyed >> 47);
}

}  // namespace digest_detail

// The digest of host memory; a last word that is not whole is filled with zeros.
inline Digest digest_of(const void* data, std::size_t bytes) noexcept {
  Digest sum;
  const auto* at = static_cast<const unsigned char*>(data);
  const std::size_t words = bytes / 8;
  std::uint64_t word = 0;
  for (std::size_t index = 0; index < words; ++index) {
    std::memcpy(&word, at + index * 8, 8);
    digest_detail::add(word, index, sum);
  }
  if (bytes % 8 == 0) return sum;
  word = 0;
  std::memcpy(&word, at + words * 8, bytes % 8);
  digest_detail::add(word, words, sum);
  return sum;
}

}  // namespace cumem
