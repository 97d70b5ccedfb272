#include "emulator/ledger.h"

#include <set>

namespace cumem::emulator {
namespace {

using Ledger = cumem_emulator_ledger_t;

bool belongs(const Device& device, const Machine& machine) { return &device.machine == &machine; }

bool is_plain(const World& world, const Mapping& mapping) {
  const Reservation* const home = world.addresses.reservation_at(mapping.range.begin);
  return home != nullptr && home->use == Use::kPlain;
}

void count_reservations(const World& world, const Machine& machine, Ledger& ledger) {
  for (const auto& [begin, reservation] : world.addresses.reservations()) {
    if (&reservation.machine != &machine || reservation.use == Use::kPlain) continue;
    ++ledger.reservations;
    ledger.reserved_bytes += reservation.addresses.range().bytes;
  }
}

void count_physical(const World& world, const Machine& machine, Ledger& ledger) {
  std::set<const Physical*> alive;
  for (const auto& [id, handle] : world.handles) {
    if (!belongs(handle.physical->device, machine)) continue;
    alive.insert(handle.physical.get());
    ledger.handle_references += handle.references;
  }
  for (const auto& [begin, mapping] : world.addresses.mappings()) {
    if (!belongs(mapping.physical->device, machine)) continue;
    const bool plain = is_plain(world, mapping);
    ++(plain ? ledger.plain_allocations : ledger.mappings);
    (plain ? ledger.plain_bytes : ledger.mapped_bytes) += mapping.range.bytes;
    if (!plain) alive.insert(mapping.physical.get());
  }
  ledger.handles = alive.size();
  for (const Physical* physical : alive) ledger.handle_bytes += physical->extent.bytes();
}

void count_host(const World& world, const Machine& machine, Ledger& ledger) {
  for (const auto& [begin, registration] : world.hosts.all()) {
    if (!belongs(registration.context.device, machine)) continue;
    ++ledger.host_registrations;
    ledger.registered_bytes += registration.range.bytes;
  }
}

void count_contexts(const Machine& machine, Ledger& ledger) {
  for (const auto& device : machine.devices) {
    const Context& context = device->context;
    ledger.contexts_retained += static_cast<std::uint64_t>(context.retains);
    ledger.dead_contexts += context.dead() ? 1u : 0u;
    for (const auto& stream : context.streams) {
      ledger.pending_work += stream->submitted - stream->completed;
      ledger.streams += stream->is_legacy() || stream->destroyed ? 0u : 1u;
    }
  }
}

}  // namespace

Ledger count_alive(const World& world, const Machine& machine) {
  Ledger ledger{};
  count_reservations(world, machine, ledger);
  count_physical(world, machine, ledger);
  count_host(world, machine, ledger);
  count_contexts(machine, ledger);
  for (const auto& [id, event] : world.events) {
    ledger.events += belongs(event->context.device, machine) ? 1u : 0u;
  }
  for (const auto& [id, module] : world.modules) {
    ledger.modules += belongs(module.context.device, machine) ? 1u : 0u;
  }
  for (const auto& capture : world.captures) {
    ledger.captures += &capture->machine == &machine ? 1u : 0u;
  }
  return ledger;
}

}  // namespace cumem::emulator
