#include "torch/plugin.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace cumem::plugin {
namespace {

struct OpenScope {
  OpenScope(int its_device, Owner its_owner) : device(its_device), owner(std::move(its_owner)) {}
  const int device;
  const Owner owner;
  std::atomic<bool> open{true};
};

// Scopes of this thread, innermost last. One that another thread closed stays
// until this thread looks.
thread_local std::vector<std::shared_ptr<OpenScope>> scopes;

std::atomic<bool> in_child{false};

// Leaked on purpose: torch frees memory until the very end of the process, after
// static destructors have begun.
struct State {
  std::mutex mutex;
  std::shared_ptr<Allocator> current;
  std::vector<std::shared_ptr<Allocator>> earlier;  // with live segments
  Owner graph_owner{"cuda_graph", "offload", 0, true};
  std::map<std::uint64_t, std::shared_ptr<OpenScope>> open;  // of all threads
  std::uint64_t next_scope = 1;
};

State& state() {
  static State* const instance = [] {
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    return new State;
  }();
  return *instance;
}

void forget_empty(std::vector<std::shared_ptr<Allocator>>& allocators) {
  auto empty = [](const auto& allocator) { return allocator->live_segments() == 0; };
  allocators.erase(std::remove_if(allocators.begin(), allocators.end(), empty), allocators.end());
}

// The allocator that made `address`; the current one when nobody did, so that
// the stray free is counted.
std::shared_ptr<Allocator> owner_of(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& allocator : state().earlier)
    if (allocator->owns(address)) return allocator;
  return state().current;
}

void forget_closed() {
  auto closed = [](const auto& scope) { return !scope->open; };
  scopes.erase(std::remove_if(scopes.begin(), scopes.end(), closed), scopes.end());
}

// Torch sends a device's allocations to the innermost scope of that device.
Owner scope_owner(int device) {
  forget_closed();
  auto found = std::find_if(scopes.rbegin(), scopes.rend(),
                            [device](const auto& scope) { return scope->device == device; });
  if (found != scopes.rend()) return (*found)->owner;
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().graph_owner;
}

}  // namespace

std::shared_ptr<Allocator> install(std::shared_ptr<Allocator> allocator) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::shared_ptr<Allocator> previous = std::move(state().current);
  auto& earlier = state().earlier;
  forget_empty(earlier);
  // Coming back: it must not be found twice.
  earlier.erase(std::remove(earlier.begin(), earlier.end(), allocator), earlier.end());
  if (previous && previous->live_segments() > 0) earlier.push_back(previous);
  state().current = std::move(allocator);
  return previous;
}

std::shared_ptr<Allocator> current() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().current;
}

std::uint64_t push_scope(int device, Owner owner) {
  auto scope = std::make_shared<OpenScope>(device, std::move(owner));
  scopes.push_back(scope);
  std::lock_guard<std::mutex> lock(state().mutex);
  state().open.emplace(state().next_scope, std::move(scope));
  return state().next_scope++;
}

void pop_scope(std::uint64_t number) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto found = state().open.find(number);
    if (found == state().open.end()) return;
    found->second->open = false;
    state().open.erase(found);
  }
  forget_closed();
}

void set_graph_owner(Owner owner) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().graph_owner = std::move(owner);
}

bool forked() noexcept { return in_child; }

}  // namespace cumem::plugin

extern "C" void* cumem_malloc(std::ptrdiff_t bytes, int device, CUstream stream) {
  using namespace cumem;
  std::shared_ptr<Allocator> allocator = plugin::current();
  if (!allocator || bytes <= 0 || plugin::forked()) return nullptr;
  CUdeviceptr address = 0;
  try {
    (void)allocator->malloc(static_cast<std::size_t>(bytes), device, stream,
                            plugin::scope_owner(device), address);
  } catch (const std::bad_alloc&) {
    return nullptr;  // the host has no memory for the books: torch sees out of memory
  }
  return reinterpret_cast<void*>(address);
}

extern "C" void cumem_free(void* address, std::size_t, int, CUstream) {
  using namespace cumem;
  if (address == nullptr || plugin::forked()) return;
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  if (std::shared_ptr<Allocator> allocator = plugin::owner_of(at)) allocator->free(at);
}
