#include "emulator/control.h"

#include <cstring>
#include <utility>

#include "emulator/call.h"
#include "emulator/error_names.h"
#include "emulator/ledger.h"

namespace cumem::emulator {
namespace {

// Runs body(world, lock) under the mutex; `otherwise` in a forked child, or when it
// cannot be run to its end.
template <class Result, class Body>
Result controlled(Result otherwise, Body body) noexcept try {
  if (is_forked_child()) return otherwise;
  World& world = World::instance();
  Lock lock(world.mutex);
  return body(world);
} catch (...) {
  return otherwise;
}

template <class Body>
int with_machine(int index, Body body) noexcept {
  return controlled(-1, [&](World& world) {
    Machine* const machine = world.machine(index);
    return machine == nullptr ? -1 : body(world, *machine);
  });
}

template <class Body>
int with_device(int machine, int ordinal, Body body) noexcept {
  return controlled(-1, [&](World& world) {
    Device* const device = world.device(machine, ordinal);
    return device == nullptr ? -1 : body(world, *device);
  });
}

// The same for functions that answer with a CUresult.
template <class Body>
int answered(Body body) noexcept {
  if (is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  return controlled<int>(CUDA_ERROR_OUT_OF_MEMORY, body);
}

// The context whose legacy stream a null stream means.
Context& meant_context(const Machine& machine) {
  Context* const current = this_thread().context();
  if (current != nullptr && &current->device.machine == &machine) return *current;
  return machine.devices.front()->context;
}

CUresult enqueue(World& world, Machine& machine, void* handle, Work work) {
  std::shared_ptr<Stream> stream;
  Context& context = meant_context(machine);
  const CUresult found = find_stream(world, &context, static_cast<CUstream>(handle), &stream);
  if (found != CUDA_SUCCESS) return found;
  if (stream->context.dead()) return stream->context.death;
  const CUresult passed = pass_submission(*stream);
  if (passed != CUDA_SUCCESS || stream->capture != nullptr) return passed;
  submit(stream, std::move(work));
  return CUDA_SUCCESS;
}

int enqueue_on(int index, void* stream, Work work) noexcept {
  return answered([&](World& world) {
    Machine* const machine = world.machine(index);
    if (machine == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(world, *machine, stream, std::move(work));
  });
}

Work work_of(Work::Kind kind, std::uint64_t device, std::uint64_t bytes, std::uint64_t delay_us) {
  Work work;
  work.kind = bytes == 0 ? Work::Kind::kNothing : kind;
  work.device = {device, bytes};
  work.delay = std::chrono::microseconds(delay_us);
  return work;
}

template <class Body>
int with_stream(void* handle, Body body) noexcept {
  return answered([&](World& world) {
    const auto found = world.streams.find(static_cast<CUstream>(handle));
    return found == world.streams.end() ? CUDA_ERROR_INVALID_HANDLE : body(world, found->second);
  });
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

int cumem_emulator_create(uint64_t capacity_bytes, int devices) {
  if (devices < 1 || devices > kDevicesAtMost) return -1;
  return controlled(-1,
                    [&](World& world) { return world.add_machine(capacity_bytes, devices).index; });
}

int cumem_emulator_select(int machine) {
  return with_machine(
      machine, [&](World& world, Machine&) { return std::exchange(world.current, machine); });
}

int cumem_emulator_set_attribute(int machine, int attribute, int value) {
  return with_machine(machine, [&](World&, Machine& found) {
    found.attributes[attribute] = value;
    return 0;
  });
}

int cumem_emulator_set_bandwidth(int machine, uint64_t bytes_per_second) {
  return with_machine(machine, [&](World&, Machine& found) {
    found.bandwidth = bytes_per_second;
    return 0;
  });
}

int cumem_emulator_set_latency(int machine, uint64_t microseconds) {
  return with_machine(machine, [&](World&, Machine& found) {
    found.latency_us = microseconds;
    return 0;
  });
}

int cumem_emulator_set_host_limit(int machine, uint64_t bytes) {
  return with_machine(machine, [&](World&, Machine& found) {
    found.host_limit = bytes;
    return 0;
  });
}

int cumem_emulator_set_host_refusal(int machine, int refuse) {
  return with_machine(machine, [&](World&, Machine& found) {
    found.refuses_host_memory = refuse != 0;
    return 0;
  });
}

int cumem_emulator_fail(int machine, const char* call, long nth, int code) {
  if (call == nullptr || !is_call(call) || nth < 1 || error_name(code) == nullptr) return -1;
  return with_machine(machine, [&](World&, Machine& found) {
    found.faults.add(call, nth, static_cast<CUresult>(code));
    return 0;
  });
}

int cumem_emulator_clear(int machine) {
  return with_machine(machine, [](World&, Machine& found) {
    found.faults.clear();
    return 0;
  });
}

long cumem_emulator_call_count(int machine, const char* call) {
  if (call == nullptr || !is_call(call)) return -1;
  return controlled(-1L, [&](World& world) {
    const Machine* const found = world.machine(machine);
    return found == nullptr ? -1L : found->faults.count(call);
  });
}

int cumem_emulator_poison(int machine, int ordinal, int code) {
  if (error_name(code) == nullptr) return -1;
  return with_device(machine, ordinal, [&](World& world, Device& device) {
    world.kill(device.context, static_cast<CUresult>(code));
    return 0;
  });
}

uint64_t cumem_emulator_used_bytes(int machine, int ordinal) {
  return controlled<uint64_t>(0, [&](World& world) -> uint64_t {
    const Device* const device = world.device(machine, ordinal);
    return device == nullptr ? 0 : device->backing.used();
  });
}

int cumem_emulator_ledger(int machine, cumem_emulator_ledger_t* ledger) {
  if (ledger == nullptr) return -1;
  return with_machine(machine, [&](World& world, Machine& found) {
    *ledger = count_alive(world, found);
    return 0;
  });
}

void* cumem_emulator_stream_create(int machine, int ordinal, int non_blocking) {
  return controlled<void*>(nullptr, [&](World& world) -> void* {
    Device* const device = world.device(machine, ordinal);
    if (device == nullptr) return nullptr;
    device->context.pinned = true;
    return add_stream(world, device->context, non_blocking == 0)->id;
  });
}

void* cumem_emulator_stream_of(int machine, int ordinal) {
  return controlled<void*>(nullptr, [&](World& world) -> void* {
    Device* const device = world.device(machine, ordinal);
    if (device == nullptr) return nullptr;
    device->context.pinned = true;
    return device->context.legacy->id;
  });
}

int cumem_emulator_stream_destroy(void* stream) {
  return with_stream(stream, [](World& world, const std::shared_ptr<Stream>& found) {
    if (found->is_legacy()) return CUDA_ERROR_INVALID_HANDLE;
    destroy_stream(world, std::shared_ptr<Stream>(found));
    return CUDA_SUCCESS;
  });
}

int cumem_emulator_enqueue_write(int machine, void* stream, uint64_t dst, const void* src,
                                 uint64_t bytes, uint64_t delay_us) {
  if (src == nullptr && bytes != 0) return CUDA_ERROR_INVALID_VALUE;
  Work work = work_of(Work::Kind::kToDevice, dst, bytes, delay_us);
  try {
    const auto* const first = static_cast<const std::byte*>(src);
    if (bytes != 0) work.staged.assign(first, first + bytes);
  } catch (const std::exception&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return enqueue_on(machine, stream, std::move(work));
}

int cumem_emulator_enqueue_read(int machine, void* stream, uint64_t src, void* dst, uint64_t bytes,
                                uint64_t delay_us) {
  if (dst == nullptr && bytes != 0) return CUDA_ERROR_INVALID_VALUE;
  Work work = work_of(Work::Kind::kToHost, src, bytes, delay_us);
  work.host = static_cast<std::byte*>(dst);
  return enqueue_on(machine, stream, std::move(work));
}

int cumem_emulator_enqueue_delay(int machine, void* stream, uint64_t delay_us) {
  return enqueue_on(machine, stream, work_of(Work::Kind::kNothing, 0, 0, delay_us));
}

int cumem_emulator_begin_capture(void* stream) {
  return with_stream(stream, [](World& world, const std::shared_ptr<Stream>& found) {
    return begin_capture(world, found, CU_STREAM_CAPTURE_MODE_GLOBAL);
  });
}

int cumem_emulator_end_capture(void* stream) {
  return with_stream(stream, [](World& world, const std::shared_ptr<Stream>& found) {
    return end_capture(world, *found, EndedBy::kAnyThread);
  });
}
