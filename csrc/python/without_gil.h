// How does a long call let other Python threads run, also when the interpreter ends meanwhile?
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace cumem {

// Releases the GIL while it lives.
//
// Note [A thread that outlives the interpreter]: before 3.14 Python ends a thread that
// asks for the GIL when the interpreter has gone, by unwinding its stack. C++ frames that
// nothing may be thrown through are on that stack, and to unwind them ends the process.
// So such a thread stops here for ever, as later Pythons have it; the process ends without it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace cumem
