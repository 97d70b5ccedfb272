// How much host memory do files take whose pages are pinned?
//
// The system counts the pages of files on a disk as available, pinned or not, so this is to be
// taken off what it says. Once for each file, however many pin it: they share its pages. What
// is to be pinned counts before it is, so that several files find room together or not at
// all. Files of a file system in memory count as used already.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "core/file.h"
#include "core/status.h"

namespace cumem {

class FilePages {
 public:
  enum class State : std::uint8_t { planned, refused, pinned };

  // Says that a file's pages are to be pinned, or are. FilePages outlives it.
  class Claim {
   public:
    Claim() = default;
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    ~Claim();
    void set(State state) noexcept;

   private:
    friend class FilePages;
    FilePages* pages_ = nullptr;  // null: nothing counts
    File::Id file_ = {};
    State state_ = State::planned;
  };

  // Refuses where the host could not hold the file's pages beside all else; then `out` is as
  // before. pre: `out` is new.
  Status claim(const File& file, Claim& out);
  // What the host could still give, beside what is claimed.
  std::size_t available() const;

 private:
  struct Entry {
    std::size_t bytes = 0;
    std::map<State, int> claims;
  };
  std::size_t total(State state) const;        // pre: mutex_ is held
  std::size_t available_without_lock() const;  // pre: the same

  mutable std::mutex mutex_;
  std::map<File::Id, Entry> entries_;
};

}  // namespace cumem
