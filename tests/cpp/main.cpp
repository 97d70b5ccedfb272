// Runs every test that is linked in: program [argument [part of a test's name]]; a minus
// before the part leaves out those that have it.
// Ends with "N tests passed" and 0, or "N of M tests failed" and 1.

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "check.h"

namespace {

// Runs one test. True when it passed or was skipped.
bool run(const check::Case& test) {
  check::Registry& registry = check::Registry::instance();
  try {
    test.run();
  } catch (const check::Ended&) {
  } catch (const std::exception& error) {
    registry.note(test.name, 0, std::string("threw ") + error.what());
  }
  const auto failures = registry.take_failures();
  const std::string skipped = registry.take_skip();
  for (const std::string& failure : failures) std::printf("%s\n", failure.c_str());
  const char* const verdict = !failures.empty() ? "FAILED" : skipped.empty() ? "ok" : "skipped: ";
  std::printf("%s ... %s%s\n", test.name, verdict, failures.empty() ? skipped.c_str() : "");
  std::fflush(stdout);
  return failures.empty();
}

}  // namespace

int main(int argc, char** argv) {
  check::Registry& registry = check::Registry::instance();
  if (argc > 1) registry.argument = argv[1];
  const char* part = argc > 2 ? argv[2] : "";
  const bool without = *part == '-';
  if (without) ++part;
  int ran = 0;
  int failed = 0;
  for (const check::Case& test : registry.cases) {
    if ((std::strstr(test.name, part) != nullptr) == without) continue;
    ++ran;
    failed += run(test) ? 0 : 1;
  }
  if (failed == 0 && ran > 0) {
    std::printf("%d tests passed\n", ran);
    return 0;
  }
  std::printf("%d of %d tests failed\n", failed, ran);
  return 1;
}
