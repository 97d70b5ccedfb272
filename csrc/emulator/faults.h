// Which call is to fail, and when?
//
// One per machine. Calls go by their unversioned names.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/driver_api.h"

namespace cumem::emulator {

// Does the emulator export this call?
bool is_call(std::string_view name);

class Faults {
 public:
  // pre: is_call(name), nth >= 1.
  void add(std::string_view name, long nth, CUresult code);
  void clear();
  long count(std::string_view name) const;

  // Counts one call. Returns the code it is to fail with, or CUDA_SUCCESS.
  CUresult on_call(std::string_view name);

 private:
  struct Rule {
    long at;  // the count at which it fires
    CUresult code;
  };
  struct Record {
    long count = 0;
    std::vector<Rule> rules;
  };
  std::map<std::string, Record, std::less<>> records_;
};

}  // namespace cumem::emulator
