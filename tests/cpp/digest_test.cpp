// Does a digest change with whatever changes in a piece?

#include "digest/digest.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using cumem::Digest;
using cumem::digest_of;
using cumem::kDigestBytes;

using Bytes = std::vector<unsigned char>;

Digest of(const Bytes& data) { return digest_of(data.data(), data.size()); }

Bytes random_bytes(std::size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes data(bytes);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

// The kinds of contents that memory is full of.
std::vector<Bytes> contents(std::size_t bytes) {
  return {Bytes(bytes, 0), Bytes(bytes, 0xFF), Bytes(bytes, 0x3F), random_bytes(bytes, 1)};
}

void flip(Bytes& data, std::size_t bit) {
  data[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
}

TEST(every_bit_of_a_small_piece_counts) {
  for (const std::size_t bytes : {1, 7, 8, 15, 16, 17, 61, 96, 123}) {
    for (Bytes data : contents(bytes)) {
      const Digest before = of(data);
      std::size_t unseen = 0;
      for (std::size_t bit = 0; bit < bytes * 8; ++bit) {
        flip(data, bit);
        unseen += of(data).first == before.first ? 1u : 0u;  // alone, as the header promises
        flip(data, bit);
      }
      CHECK_EQ(unseen, 0u);
      CHECK(of(data) == before);
    }
  }
}

TEST(every_two_bits_of_a_small_piece_count) {
  for (Bytes data : contents(40)) {
    const Digest before = of(data);
    std::size_t unseen = 0;
    for (std::size_t one = 0; one < data.size() * 8; ++one) {
      flip(data, one);
      for (std::size_t two = 0; two < one; ++two) {
        flip(data, two);
        unseen += of(data) == before ? 1u : 0u;
        flip(data, two);
      }
      flip(data, one);
    }
    CHECK_EQ(unseen, 0u);
  }
}

TEST(a_bit_anywhere_in_a_whole_piece_counts) {
  std::mt19937_64 random(2);
  Bytes data = random_bytes(kDigestBytes, 3);
  const Digest before = of(data);
  std::vector<std::size_t> bits(60);
  std::generate(bits.begin(), bits.end(), [&] { return random() % (kDigestBytes * 8); });
  bits.insert(bits.end(), {0, 7, kDigestBytes * 4, kDigestBytes * 8 - 8, kDigestBytes * 8 - 1});
  for (const std::size_t bit : bits) {
    flip(data, bit);
    CHECK(of(data).first != before.first);
    flip(data, bit);
  }
}

// Two signs that flip, say: the change is in the highest bits of two words.
TEST(the_highest_bits_of_two_words_do_not_cancel_out) {
  std::mt19937_64 random(7);
  for (const std::uint64_t mask : {std::uint64_t{1} << 63, std::uint64_t{1} << 62,
                                   std::uint64_t{1} << 63 | std::uint64_t{1} << 31}) {
    std::size_t unseen = 0;
    for (int round = 0; round < 20000; ++round) {
      const std::uint64_t before[] = {random(), random(), random(), random()};
      const std::uint64_t after[] = {before[0], before[1] ^ mask, before[2], before[3] ^ mask};
      const Digest one = digest_of(before, sizeof(before));
      const Digest two = digest_of(after, sizeof(after));
      unseen += one.first == two.first || one.second == two.second ? 1u : 0u;
    }
    CHECK_EQ(unseen, 0u);
  }
}

TEST(swapped_words_count) {
  const Bytes data = random_bytes(512, 4);
  const Digest before = of(data);
  std::size_t unseen = 0;
  for (std::size_t one = 0; one < data.size(); one += 8) {
    for (std::size_t two = 0; two < one; two += 8) {
      Bytes swapped = data;
      std::swap_ranges(swapped.begin() + one, swapped.begin() + one + 8, swapped.begin() + two);
      unseen += of(swapped) == before ? 1u : 0u;
    }
  }
  CHECK_EQ(unseen, 0u);
}

TEST(moved_blocks_count) {
  const Bytes data = random_bytes(kDigestBytes, 5);
  const Digest before = of(data);
  for (const std::size_t block : {std::size_t{8}, std::size_t{512}, kDigestBytes / 2}) {
    Bytes moved = data;
    std::rotate(moved.begin(), moved.begin() + block, moved.end());
    CHECK(of(moved) != before);
    moved = data;
    std::swap_ranges(moved.begin(), moved.begin() + block, moved.end() - block);
    CHECK(of(moved) != before);
  }
}

TEST(lengths_count_by_whole_words) {
  const Bytes data(kDigestBytes, 0);
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (std::size_t bytes = 0; bytes <= 4096; bytes += 8) {
    const Digest digest = digest_of(data.data(), bytes);
    seen.insert({digest.first, digest.second});
  }
  CHECK_EQ(seen.size(), std::size_t{4096 / 8 + 1});
  CHECK(digest_of(data.data(), 9) == digest_of(data.data(), 16));  // filled with zeros
  CHECK(digest_of(data.data(), 0) == Digest{});
}

TEST(changes_that_arithmetic_makes_count) {
  std::vector<std::uint32_t> words(4096);
  std::iota(words.begin(), words.end(), 0x3F800000U);
  const auto digest = [&] { return digest_of(words.data(), words.size() * 4); };
  const Digest before = digest();
  for (std::uint32_t& word : words) word ^= 0x80000000U;  // every sign
  CHECK(digest() != before);
  for (std::uint32_t& word : words) word ^= 0x80000000U;
  for (std::uint32_t& word : words) word += 1;  // the last place of each
  CHECK(digest() != before);
  for (std::size_t i = 0; i + 1 < words.size(); i += 2) --words[i], words[i + 1] -= 1;
  CHECK(digest() == before);
}

}  // namespace
