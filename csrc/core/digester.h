// How does the core learn whether device memory still holds what a backup holds?
//
// By digests that the device computes itself, at the speed of its own memory. The
// kernel is given as an image at run time; a device without one has no digester,
// and then every sleep copies everything.
//
// Pieces are digested in batches. Their list and the results live in pinned host
// memory that the kernel reads and writes directly, so that no device memory is
// needed when there is none.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/device.h"
#include "core/status.h"
#include "digest/digest.h"

namespace cumem {

class Digester {
 public:
  static constexpr std::size_t kBatch = 512;  // pieces: at most 1 GiB
  static constexpr std::size_t kSlots = 2;    // one is computed while one is used

  // Loads the kernel. pre: the device's context is current. On failure `out` is
  // empty and nothing is held.
  static Status open(Device& device, const void* image, std::unique_ptr<Digester>& out);
  ~Digester();
  Digester(const Digester&) = delete;
  Digester& operator=(const Digester&) = delete;

  // Starts the digests of at most kBatch pieces in `slot`.
  // pre: the context is current; the slot's earlier results are no longer needed.
  // After a failure here or in finish() no kernel runs any more.
  Status start(std::size_t slot, const std::vector<DigestPiece>& pieces);
  // Waits for them; `digests` then has one result a piece, until the next start().
  Status finish(std::size_t slot, const Digest*& digests);

 private:
  struct Slot {
    DigestPiece pieces[kBatch];
    Digest digests[kBatch];
  };
  explicit Digester(Device& device) : device_(device) {}
  Status load(const void* image);
  Status pin();
  Status unpin();
  Status settled(Status status) const;

  Device& device_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent done_[kSlots] = {};
  Slot* slots_ = nullptr;  // kSlots of them, pinned
};

}  // namespace cumem
