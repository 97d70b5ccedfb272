#include "emulator/stream.h"

#include <algorithm>
#include <utility>

#include "emulator/worker.h"
#include "emulator/world.h"

namespace cumem::emulator {
namespace {

bool all_reached(const std::vector<Point>& points) {
  return std::all_of(points.begin(), points.end(), [](const Point& p) { return p.reached(); });
}

Point end_of(const std::shared_ptr<Stream>& stream) { return {stream, stream->submitted}; }

// The legacy stream and the blocking streams wait for each other.
void add_implicit(const Stream& stream, std::vector<Point>& after) {
  if (stream.is_legacy()) {
    for (const auto& other : stream.context.streams) {
      if (other->blocking && other.get() != &stream) after.push_back(end_of(other));
    }
  } else if (stream.blocking) {
    after.push_back(end_of(stream.context.legacy));
  }
}

void drop_reached(std::vector<Point>& points) {
  const auto reached = [](const Point& point) { return point.reached(); };
  points.erase(std::remove_if(points.begin(), points.end(), reached), points.end());
}

}  // namespace

bool Point::reached() const { return stream == nullptr || stream->completed >= tasks; }

void submit(const std::shared_ptr<Stream>& stream, Work work, std::vector<Point> after) {
  add_implicit(*stream, after);
  drop_reached(after);
  const std::chrono::microseconds latency(stream->context.device.machine.latency_us);
  Task task{std::move(work), std::move(after), Clock::now() + latency};
  if (!stream->has_worker) start_worker(stream);
  stream->queue.push_back(std::move(task));
  ++stream->submitted;
}

std::vector<Point> everything_on(const std::shared_ptr<Stream>& stream) {
  std::vector<Point> points;
  if (stream->is_legacy()) add_implicit(*stream, points);
  points.push_back(end_of(stream));
  return points;
}

std::vector<Point> everything_in(const Context& context) {
  std::vector<Point> points;
  for (const auto& stream : context.streams) points.push_back(end_of(stream));
  return points;
}

CUresult wait_for(World& world, Lock& lock, const std::vector<Point>& points,
                  const Context& context) {
  world.changed.wait(lock, [&] { return context.dead() || all_reached(points); });
  return context.death;
}

void retire(Stream& stream) {
  if (!stream.destroyed || stream.has_worker) return;
  auto& streams = stream.context.streams;
  const auto is_it = [&](const auto& other) { return other.get() == &stream; };
  streams.erase(std::remove_if(streams.begin(), streams.end(), is_it), streams.end());
}

}  // namespace cumem::emulator
