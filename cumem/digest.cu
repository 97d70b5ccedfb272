// The digest of csrc/digest/digest.h on a GPU: one block a piece, 16 bytes a load.
// Compiled at run time for the device that it runs on.

typedef unsigned long long u64;

struct Piece {
  u64 address;  // a multiple of 16
  u64 bytes;
};

struct Digest {
  u64 first;
  u64 second;
};

__device__ __forceinline__ void add(u64 word, u64 index, Digest& sum) {
  u64 mixed = word ^ ((index + 1) * 0x9E3779B97F4A7C15ULL);
  mixed = (mixed ^ (mixed >> 29)) * 0xC2B2AE3D27D4EB4FULL;
  const u64 one = (mixed ^ (mixed >> 29)) * 0x165667B19E3779F9ULL;
  const u64 other = (mixed ^ (mixed >> 32)) * 0x27D4EB2F165667C5ULL;
  sum.first += one ^ (one >> 32);
  sum.second += other ^ (other >> 32);
}

// The words after the last whole pair; at most 15 bytes.
__device__ void add_tail(const Piece& piece, Digest& sum) {
  const unsigned char* data = reinterpret_cast<const unsigned char*>(piece.address);
  for (u64 at = piece.bytes / 16 * 16; at < piece.bytes; at += 8) {
    u64 word = 0;
    for (u64 byte = 0; byte < 8 && at + byte < piece.bytes; ++byte)
      word |= static_cast<u64>(data[at + byte]) << (8 * byte);
    add(word, at / 8, sum);
  }
}

extern "C" __global__ void __launch_bounds__(512) cumem_digest(const Piece* pieces,
                                                               Digest* digests) {
  __shared__ Digest sums[16];
  const Piece piece = pieces[blockIdx.x];
  const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(piece.address);
  const u64 count = piece.bytes / 16;
  Digest sum = {0, 0};
#pragma unroll 8
  for (u64 i = threadIdx.x; i < count; i += 512) {
    const ulonglong2 pair = __ldcs(pairs + i);  // read once: keep the cache for others
    add(pair.x, 2 * i, sum);
    add(pair.y, 2 * i + 1, sum);
  }
  if (threadIdx.x == 0) add_tail(piece, sum);
  for (int step = 16; step > 0; step /= 2) {
    sum.first += __shfl_down_sync(0xFFFFFFFFu, sum.first, step);
    sum.second += __shfl_down_sync(0xFFFFFFFFu, sum.second, step);
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < 16; ++warp) {
    sum.first += sums[warp].first;
    sum.second += sums[warp].second;
  }
  digests[blockIdx.x] = sum;
}
