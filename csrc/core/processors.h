// Which processors are near a device?
//
// Host memory belongs to the NUMA node of the thread that first touches it, and
// copies to and from a GPU are fastest on the node that its PCIe slot is on.
#pragma once

#include <sched.h>

#include <memory>
#include <string>

namespace cumem {

// The processors that the system says are local to a PCI device ("0000:3b:00.0")
// and that this process may use; null when that is all of them or unknown.
std::shared_ptr<const cpu_set_t> processors_near(const std::string& pci_bus_id);

// Restricts the calling thread to `processors`. Advice: a refusal is not an error.
void stay_near(const cpu_set_t& processors) noexcept;

}  // namespace cumem
