// Which prototypes does the emulator implement?
//
// cuda.h itself, with default visibility: the library is compiled with
// -fvisibility=hidden and exports exactly what cuda.h and control.h declare. A
// definition written as cuMemHostRegister gets the _v2 name from cuda.h's macro.
#pragma once

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop
