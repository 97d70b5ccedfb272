// What is alive on a machine?
#pragma once

#include "emulator/control.h"
#include "emulator/world.h"

namespace cumem::emulator {

cumem_emulator_ledger_t count_alive(const World& world, const Machine& machine);

}  // namespace cumem::emulator
