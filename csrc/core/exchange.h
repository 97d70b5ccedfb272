// How do two sets of segments change places on one device?
//
// Note [Switch]
//
// Copies run in both directions at once. Segments that leave are saved in order, a
// few ahead of the one that is waited for; each is unmapped as soon as its own copy is
// done, and its memory is handed to an arriving segment of the same size, without the
// driver. The thread itself only waits for the device, so it keeps both directions
// busy.
//
// So whoever can take what is there arrives first, where that is one of the next few.
//
// Memory of other sizes does go through the driver, which scrubs what was released
// before it hands it out again. Copies are slower meanwhile (measured: 37 GB/s instead of
// 55), and a creation that needs memory under scrub waits. So as little as possible goes
// there: what nobody takes is held until it is worth a release, and new memory is created
// only for a start and for what was released. A reserve of room is left alone until
// nothing more is to leave: what is handed out was released a while ago.
#pragma once

#include <cstddef>
#include <vector>

#include "core/event.h"
#include "core/leaving.h"
#include "core/saver.h"
#include "core/transfer.h"
#include "core/transition.h"

namespace cumem {

class Exchange {
 public:
  // pre: the device has no work of others; the context is current from here on.
  // `digester` may be null.
  Exchange(Device& device, Saver& saver, Transfer& out, Transfer& in, Digester* digester,
           Transition& transition)
      : device_(device),
        saver_(saver),
        out_(out),
        in_(in),
        digester_(digester),
        transition_(transition) {}

  void leave(Leaving& item) { leaving_.push_back(Departure{&item, {}, false}); }
  void arrive(Segment& segment) { arriving_.push_back(&segment); }

  // Runs until all have changed places or something failed. Afterwards, also after a
  // failure, no copy is running, and an arriving segment is either among arrived(),
  // to be published by the caller, or was unmapped.
  Status run(const WakeRequest& request, SleepResult& result);
  // Those that are wholly mapped and filled.
  const std::vector<Segment*>& arrived() const noexcept { return mapped_; }

 private:
  struct Departure {
    Leaving* item;
    Event saved;
    bool submitted;
  };
  Status measure_room();
  Status save_ahead();
  Status release_next(SleepResult& result);
  Status bring_in(const WakeRequest& request, SleepResult& result);
  std::size_t budget() const noexcept;
  bool may_create(std::size_t bytes) const noexcept;
  Segment& next_to_arrive();
  Status send();
  Status give_back(SleepResult& result);
  Status settle();

  Device& device_;
  Saver& saver_;
  Transfer& out_;
  Transfer& in_;
  Digester* const digester_;
  Transition& transition_;
  PhysicalPool pool_;
  std::vector<Departure> leaving_;
  std::vector<Segment*> arriving_;
  std::vector<Segment*> mapped_;  // perhaps still being filled
  std::size_t sent_ = 0;          // of mapped_, whose copies the driver has for certain
  std::size_t submitted_ = 0;     // of leaving_
  std::size_t released_ = 0;      // of leaving_
  std::size_t ahead_bytes_ = 0;   // submitted and not released
  std::size_t room_ = 0;          // bytes of device memory that can be had
  std::size_t reserve_ = 0;       // of those, left alone while something leaves
  std::size_t created_ = 0;       // bytes of new memory
  std::size_t returned_ = 0;      // bytes that went back to the driver
};

}  // namespace cumem
