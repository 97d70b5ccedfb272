// How is a test written here?
//
//   TEST(sleep_gives_memory_back) {
//     REQUIRE(thing != nullptr);        // ends the test when it fails
//     CHECK(bytes > 0);                 // notes the failure and goes on
//     CHECK_EQ(freed, kGranularity);    // shows both values
//   }
//
// Tests register themselves; main.cpp runs them in order of registration. Checks
// may be made from any thread, REQUIRE only from the test's own.
#pragma once

#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};

struct Ended {};  // thrown by REQUIRE and SKIP

class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  std::vector<Case> cases;
  std::string argument;  // the program's first argument, or empty

  void note(const char* file, int line, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_.push_back(std::string(file) + ":" + std::to_string(line) + ": " + text);
  }
  void skip(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    skipped_ = reason;
  }
  // What the test since the last call left behind.
  std::vector<std::string> take_failures() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(failures_, {});
  }
  std::string take_skip() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(skipped_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> failures_;
  std::string skipped_;
};

struct Registration {
  Registration(const char* name, void (*run)()) {
    Registry::instance().cases.push_back({name, run});
  }
};

template <class Value>
std::string text_of(const Value& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<Value>) {
    out << static_cast<long long>(value);
  } else {
    out << value;
  }
  return out.str();
}

inline bool expect(bool holds, const char* file, int line, const char* text) {
  if (!holds) Registry::instance().note(file, line, text);
  return holds;
}

template <class Left, class Right>
void expect_equal(const Left& left, const Right& right, const char* file, int line,
                  const char* text) {
  if (left == right) return;
  const std::string values = " (" + text_of(left) + " and " + text_of(right) + ")";
  Registry::instance().note(file, line, text + values);
}

}  // namespace check

#define TEST(name)                                                   \
  static void name();                                                \
  static const check::Registration name##_registration(#name, name); \
  static void name()

#define CHECK(expression) check::expect((expression), __FILE__, __LINE__, #expression)

#define CHECK_EQ(left, right) \
  check::expect_equal((left), (right), __FILE__, __LINE__, #left " == " #right)

#define REQUIRE(expression)                       \
  do {                                            \
    if (!CHECK(expression)) throw check::Ended{}; \
  } while (false)

#define SKIP(reason)                          \
  do {                                        \
    check::Registry::instance().skip(reason); \
    throw check::Ended{};                     \
  } while (false)
