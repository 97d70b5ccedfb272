#include "emulator/world.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <system_error>

#include "emulator/allocate.h"

namespace cumem::emulator {
namespace {

std::atomic<bool> g_forked_child{false};

constexpr std::uint64_t kUsualCapacity = std::uint64_t{4} << 30;
constexpr std::uint64_t kFirstNumber = std::uint64_t{0xC0DE} << 32;
constexpr std::uint64_t kNumberStep = 16;

// Not thread_local: in a library that is loaded late, that memory is handed from
// thread to thread in a way that the thread sanitizer takes for a race.
pthread_key_t make_thread_key() {
  pthread_key_t key;
  const int error =
      pthread_key_create(&key, [](void* state) { delete static_cast<ThreadState*>(state); });
  if (error != 0) throw std::system_error(error, std::generic_category());
  return key;
}

// See Note [Staying loaded].
void stay_loaded() {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&is_forked_child), &self) == 0) return;
  dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

// A whole positive number from the environment, or the fallback.
std::uint64_t from_environment(const char* name, std::uint64_t fallback) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text < '0' || *text > '9') return fallback;
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text, &end, 10);
  return *end == '\0' && value != 0 ? value : fallback;
}

}  // namespace

bool is_forked_child() { return g_forked_child.load(std::memory_order_relaxed); }

ThreadState& this_thread() {
  static const pthread_key_t key = make_thread_key();
  auto* state = static_cast<ThreadState*>(pthread_getspecific(key));
  if (state == nullptr) {
    auto made = std::make_unique<ThreadState>();
    const int error = pthread_setspecific(key, made.get());
    if (error != 0) throw std::system_error(error, std::generic_category());
    state = made.release();
  }
  return *state;
}

World& World::instance() {
  static World* const world = new World;
  return *world;
}

World::World() : last_number_(kFirstNumber) {
  stay_loaded();
  pthread_atfork(nullptr, nullptr, [] { g_forked_child.store(true, std::memory_order_relaxed); });
  const std::uint64_t capacity = from_environment("CUMEM_EMULATED_CAPACITY", kUsualCapacity);
  const std::uint64_t devices = from_environment("CUMEM_EMULATED_DEVICES", 1);
  add_machine(capacity, static_cast<int>(std::min<std::uint64_t>(devices, kDevicesAtMost)));
}

Machine& World::add_machine(std::size_t capacity, int devices) {
  auto made = std::make_unique<Machine>();
  made->index = static_cast<int>(machines.size());
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    const auto id = fresh_handle<CUcontext>();
    made->devices.push_back(
        std::make_unique<Device>(*made, ordinal, capacity & ~(kGranularity - 1), id));
    Context& context = made->devices.back()->context;
    context.legacy = add_stream(*this, context, true);
    contexts.emplace(id, &context);
  }
  machines.push_back(std::move(made));
  return *machines.back();
}

Machine* World::machine(int index) {
  const bool known = index >= 0 && static_cast<std::size_t>(index) < machines.size();
  return known ? machines[static_cast<std::size_t>(index)].get() : nullptr;
}

Device* World::device(CUdevice value) {
  return value < 0 ? nullptr : device(value / kDevicesAtMost, value % kDevicesAtMost);
}

Device* World::device(int index, int ordinal) {
  Machine* const found = machine(index);
  if (found == nullptr || ordinal < 0) return nullptr;
  const auto at = static_cast<std::size_t>(ordinal);
  return at < found->devices.size() ? found->devices[at].get() : nullptr;
}

std::uint64_t World::fresh_number() { return last_number_ += kNumberStep; }

void World::reset(Lock& lock, Context& context) {
  wait_for(*this, lock, everything_in(context), context);
  if (context.active()) return;
  const std::vector<std::shared_ptr<Stream>> doomed = context.streams;
  for (const auto& stream : doomed) {
    if (!stream->is_legacy()) destroy_stream(*this, stream);
  }
  for (auto entry = events.begin(); entry != events.end();) {
    entry = &entry->second->context == &context ? events.erase(entry) : std::next(entry);
  }
  for (auto entry = modules.begin(); entry != modules.end();) {
    entry = &entry->second.context == &context ? modules.erase(entry) : std::next(entry);
  }
  std::vector<std::uintptr_t> plain;
  for (const auto& [begin, mapping] : addresses.mappings()) {
    if (&mapping.physical->device == &context.device) plain.push_back(begin);
  }
  for (const std::uintptr_t begin : plain) free_plain(*this, begin);
  hosts.remove_all_of(context);
}

void World::wait_until_still(Lock& lock, const Range& range) {
  changed.wait(lock, [&] {
    return std::none_of(moving.begin(), moving.end(),
                        [&](const Range& other) { return other.overlaps(range); });
  });
}

void World::kill(Context& context, CUresult code) {
  context.death = code;
  changed.notify_all();
}

CUresult find_stream(World& world, Context* context, CUstream handle,
                     std::shared_ptr<Stream>* stream) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *stream = context->legacy;
    return CUDA_SUCCESS;
  }
  const auto found = world.streams.find(handle);
  if (found == world.streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  *stream = found->second;
  return CUDA_SUCCESS;
}

const Module* find_module(const World& world, CUfunction function) {
  for (const auto& [id, module] : world.modules) {
    if (module.digest == function) return &module;
  }
  return nullptr;
}

std::shared_ptr<Stream> add_stream(World& world, Context& context, bool blocking) {
  auto stream = std::make_shared<Stream>(world.fresh_handle<CUstream>(), context, blocking);
  context.streams.push_back(stream);
  world.streams.emplace(stream->id, stream);
  return stream;
}

void destroy_stream(World& world, const std::shared_ptr<Stream>& stream) {
  if (stream->capture != nullptr) {
    stream->capture->spoilt = true;
    if (stream->capture->origin == stream->id) end_capture(world, *stream, EndedBy::kAnyThread);
  }
  world.streams.erase(stream->id);
  stream->destroyed = true;
  retire(*stream);
}

}  // namespace cumem::emulator
