// What is the digest of a piece of memory?
//
// Two 64-bit sums over its 64-bit words. Every word is mixed with its position, so
// that moved words count as changed, and then in two ways, each a bijection of the
// word: a change that is confined to one aligned word always changes both sums. Any
// other change goes unseen only if both sums collide, each about once in 2^64 for
// changes made without knowledge of the digest. It is no defence against somebody who
// wants to collide it.
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
constexpr std::uint64_t kMix3 = 0x27D4EB2F165667C5U;

inline void add(std::uint64_t word, std::uint64_t index, Digest& sum) noexcept {
  // High bits must come down before a multiplication, which only carries upwards, and
  // the last step must not be one: it would only scale the sum.
  std::uint64_t mixed = word ^ ((index + 1) * kStep);
  mixed = (mixed ^ (mixed >> 29)) * kMix1;
  const std::uint64_t one = (mixed ^ (mixed >> 29)) * kMix2;
  const std::uint64_t other = (mixed ^ (mixed >> 32)) * kMix3;
  sum.first += one ^ (one >> 32);
  sum.second += other ^ (other >> 32);
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
