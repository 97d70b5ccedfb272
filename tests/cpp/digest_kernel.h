// What do tests of the digest kernel launch, and how?
#pragma once

#include <utility>
#include <vector>

#include "computer.h"
#include "digest/digest.h"

using cumem::Digest;
using cumem::digest_of;
using cumem::DigestPiece;

inline constexpr char kImage[] = "cumem emulated digest, and whatever follows";

class Kernel {
 public:
  explicit Kernel(const Computer& computer) : cu(computer.cu) {
    REQUIRE_OK(cu.cuModuleLoadData(&module, kImage));
    REQUIRE_OK(cu.cuModuleGetFunction(&function, module, "cumem_digest"));
  }
  ~Kernel() { cu.cuModuleUnload(module); }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  CUresult launch(CUstream stream, std::size_t count, DigestPiece* pieces, Digest* digests) const {
    void* arguments[] = {&pieces, &digests};
    const CUresult launched = cu.cuLaunchKernel(function, static_cast<unsigned>(count), 1, 1, 512,
                                                1, 1, 0, stream, arguments, nullptr);
    pieces = nullptr;  // the values were taken at the call
    digests = nullptr;
    return launched;
  }

  const LoadedDriver& cu;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
};

// A list and its results in registered memory.
class Batch {
 public:
  Batch(const Computer& computer, std::vector<DigestPiece> list)
      : pieces(std::move(list)), digests(pieces.size()), cu_(computer.cu) {
    REQUIRE_OK(cu_.cuMemHostRegister(pieces.data(), pieces.size() * sizeof(DigestPiece), kMapped));
    REQUIRE_OK(cu_.cuMemHostRegister(digests.data(), digests.size() * sizeof(Digest), kMapped));
  }
  ~Batch() {
    cu_.cuMemHostUnregister(pieces.data());
    cu_.cuMemHostUnregister(digests.data());
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  CUresult launch(const Kernel& kernel, CUstream stream) {
    return kernel.launch(stream, pieces.size(), pieces.data(), digests.data());
  }

  std::vector<DigestPiece> pieces;
  std::vector<Digest> digests;

 private:
  static constexpr unsigned kMapped = CU_MEMHOSTREGISTER_DEVICEMAP;
  const LoadedDriver& cu_;
};

inline void revive(const Computer& pc) {
  CHECK_EQ(pc.cu.cumem_emulator_poison(pc.machine, 0, 0), 0);
}
