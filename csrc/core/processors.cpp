#include "core/processors.h"

#include <pthread.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>

namespace cumem {
namespace {

// Reads a list such as "0-15,64-79".
cpu_set_t parse(const char* text) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  while (std::isdigit(static_cast<unsigned char>(*text)) != 0) {
    char* end = nullptr;
    const long first = std::strtol(text, &end, 10);
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &set);
    text = *end == ',' ? end + 1 : end;
  }
  return set;
}

}  // namespace

std::shared_ptr<const cpu_set_t> processors_near(const std::string& pci_bus_id) {
  std::string path = "/sys/bus/pci/devices/" + pci_bus_id + "/local_cpulist";
  std::transform(path.begin(), path.end(), path.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                       &std::fclose);
  char line[4096] = {};
  cpu_set_t allowed;
  if (!file || std::fgets(line, sizeof(line), file.get()) == nullptr) return nullptr;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return nullptr;
  cpu_set_t near = parse(line);
  CPU_AND(&near, &near, &allowed);
  if (CPU_COUNT(&near) == 0 || CPU_EQUAL(&near, &allowed)) return nullptr;
  return std::make_shared<const cpu_set_t>(near);
}

void stay_near(const cpu_set_t& processors) noexcept {
  pthread_setaffinity_np(pthread_self(), sizeof(processors), &processors);
}

}  // namespace cumem
