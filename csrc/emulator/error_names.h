// What are the driver's errors called?
#pragma once

namespace cumem::emulator {

// Null for a code that the driver does not have.
const char* error_name(int code);

}  // namespace cumem::emulator
