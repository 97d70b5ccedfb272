#include "core/digester.h"

#include <sys/mman.h>

#include <algorithm>

namespace cumem {
namespace {

constexpr unsigned kThreads = 512;  // as the kernel's bounds say

}  // namespace

Status Digester::open(Device& device, const void* image, std::unique_ptr<Digester>& out) {
  out.reset();
  std::unique_ptr<Digester> digester(new Digester(device));
  if (Status status = digester->load(image); !status.ok()) return status;
  if (Status status = digester->pin(); !status.ok()) return status;
  out = std::move(digester);
  return {};
}

Status Digester::load(const void* image) {
  const Driver& driver = device_.driver();
  const int ordinal = device_.ordinal();
  if (driver.cuModuleLoadData == nullptr || driver.cuModuleGetFunction == nullptr ||
      driver.cuModuleUnload == nullptr || driver.cuLaunchKernel == nullptr)
    return failure(Fault::unsupported, "cuModuleLoadData", 0, ordinal);
  Status status = check(driver.cuModuleLoadData(&module_, image), "cuModuleLoadData", 0, ordinal);
  if (status.ok())
    status = check(driver.cuModuleGetFunction(&function_, module_, "cumem_digest"),
                   "cuModuleGetFunction", 0, ordinal);
  if (status.ok())
    status = check(driver.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate", 0,
                   ordinal);
  for (CUevent& event : done_) {
    // Blocking: a thread that waits must not burn a processor.
    constexpr unsigned flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if (status.ok())
      status = check(driver.cuEventCreate(&event, flags), "cuEventCreate", 0, ordinal);
  }
  return status;
}

Status Digester::pin() {
  constexpr std::size_t bytes = kSlots * sizeof(Slot);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return failure(Fault::host_memory, "mmap", bytes);
  Status status =
      check(device_.driver().cuMemHostRegister(memory, bytes, CU_MEMHOSTREGISTER_DEVICEMAP),
            "cuMemHostRegister", bytes, device_.ordinal());
  if (!status.ok()) {
    munmap(memory, bytes);
    return status;
  }
  slots_ = static_cast<Slot*>(memory);
  device_.driver().ledger().registered_bytes += bytes;
  return {};
}

Status Digester::unpin() {
  constexpr std::size_t bytes = kSlots * sizeof(Slot);
  Status status = check(device_.driver().cuMemHostUnregister(slots_), "cuMemHostUnregister", bytes);
  if (status.ok()) device_.driver().ledger().registered_bytes -= bytes;
  return status;
}

Digester::~Digester() {
  const Driver& driver = device_.driver();
  RelaxedCapture relaxed(driver);
  ContextGuard context(device_);
  auto tried = [&driver](Status status) {
    if (!status.ok()) driver.refuse(status);
    return status.ok();
  };
  if (stream_ != nullptr) tried(check(driver.cuStreamSynchronize(stream_), "cuStreamSynchronize"));
  if (slots_ != nullptr && tried(unpin())) munmap(slots_, kSlots * sizeof(Slot));
  for (CUevent event : done_)
    if (event != nullptr) tried(check(driver.cuEventDestroy(event), "cuEventDestroy"));
  if (stream_ != nullptr) tried(check(driver.cuStreamDestroy(stream_), "cuStreamDestroy"));
  if (module_ != nullptr) tried(check(driver.cuModuleUnload(module_), "cuModuleUnload"));
}

Status Digester::start(std::size_t slot, const std::vector<DigestPiece>& pieces) {
  const Driver& driver = device_.driver();
  const int ordinal = device_.ordinal();
  Slot& used = slots_[slot];
  std::copy(pieces.begin(), pieces.end(), used.pieces);
  // Registered host memory has the same address on the device (unified addressing).
  DigestPiece* list = used.pieces;
  Digest* results = used.digests;
  void* arguments[] = {&list, &results};
  const auto blocks = static_cast<unsigned>(pieces.size());
  Status status = check(driver.cuLaunchKernel(function_, blocks, 1, 1, kThreads, 1, 1, 0, stream_,
                                              arguments, nullptr),
                        "cuLaunchKernel", 0, ordinal);
  if (!status.ok()) return status;
  return settled(check(driver.cuEventRecord(done_[slot], stream_), "cuEventRecord", 0, ordinal));
}

Status Digester::finish(std::size_t slot, const Digest*& digests) {
  digests = slots_[slot].digests;
  return settled(check(device_.driver().cuEventSynchronize(done_[slot]), "cuEventSynchronize", 0,
                       device_.ordinal()));
}

// After a refusal the kernel may still read memory that the caller is about to unmap.
Status Digester::settled(Status status) const {
  if (!status.ok()) (void)device_.driver().cuStreamSynchronize(stream_);
  return status;
}

}  // namespace cumem
