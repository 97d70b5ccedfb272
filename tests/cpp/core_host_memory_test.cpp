// Which pages count as memory that a container may still take? Against files that say what
// the kernel's would.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "core/host_memory.h"

namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

std::string gib(std::size_t count) { return std::to_string(count * kGiB); }

// A host with 64 GiB available, and what its control groups say.
class Host {
 public:
  Host() {
    char name[] = "/tmp/cumem-host-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    root_ = name;
    write("proc/meminfo", "MemTotal: 134217728 kB\nMemAvailable: 67108864 kB\n");
  }
  ~Host() { std::filesystem::remove_all(root_); }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void write_v2(const std::string& limit, const std::string& used, const std::string& stat) const {
    write("sys/fs/cgroup/memory.max", limit + "\n");
    write("sys/fs/cgroup/memory.current", used + "\n");
    write("sys/fs/cgroup/memory.stat", stat);
  }
  void write_v1(const std::string& limit, const std::string& used, const std::string& stat) const {
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", limit + "\n");
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", used + "\n");
    write("sys/fs/cgroup/memory/memory.stat", stat);
  }
  std::size_t available_gib(std::size_t pinned_gib = 0) const {
    return cumem::available_host_bytes(pinned_gib * kGiB, root_.string()) / kGiB;
  }

 private:
  std::filesystem::path root_;
};

// Of 20 GiB used: 3 of the process, 2 in a tmpfs, 15 pages of files.
std::string stat_v2() {
  return "anon " + gib(3) + "\nfile " + gib(17) + "\nshmem " + gib(2) + "\ninactive_anon " +
         gib(3) + "\nactive_anon " + gib(2) + "\ninactive_file " + gib(4) + "\nactive_file " +
         gib(11) + "\nunevictable 0\n";
}

TEST(without_a_control_group_the_systems_word_counts) {
  const Host host;
  CHECK_EQ(host.available_gib(), std::size_t{64});
  CHECK_EQ(host.available_gib(10), std::size_t{54});
  CHECK_EQ(host.available_gib(100), std::size_t{0});
}

TEST(pages_of_files_in_use_and_not_are_free_in_a_control_group) {
  const Host host;
  host.write_v2(gib(24), gib(20), stat_v2());
  CHECK_EQ(host.available_gib(), std::size_t{24 - 3 - 2});
}

TEST(pages_of_a_tmpfs_are_not_free_in_a_control_group) {
  const Host host;
  host.write_v2(gib(24), gib(20),
                "file " + gib(20) + "\nshmem " + gib(20) + "\nactive_anon " + gib(20) +
                    "\ninactive_file 0\nactive_file 0\n");
  CHECK_EQ(host.available_gib(), std::size_t{4});
}

TEST(pinned_pages_of_files_are_not_free_in_a_control_group) {
  const Host host;
  host.write_v2(gib(24), gib(20), stat_v2());
  CHECK_EQ(host.available_gib(12), std::size_t{24 - 20 + 3});
  CHECK_EQ(host.available_gib(15), std::size_t{4});
  CHECK_EQ(host.available_gib(30), std::size_t{4});
}

TEST(a_control_group_of_version_1_counts_the_groups_below) {
  const Host host;
  host.write_v1(gib(24), gib(20),
                "inactive_file 0\nactive_file 0\ntotal_inactive_file " + gib(4) +
                    "\ntotal_active_file " + gib(11) + "\n");
  CHECK_EQ(host.available_gib(), std::size_t{19});
  CHECK_EQ(host.available_gib(12), std::size_t{7});
}

TEST(the_smallest_limit_counts) {
  const Host host;
  host.write_v2("max", gib(20), stat_v2());
  CHECK_EQ(host.available_gib(), std::size_t{64});
  host.write_v1("9223372036854771712", gib(20), "total_active_file " + gib(11) + "\n");
  CHECK_EQ(host.available_gib(), std::size_t{64});
  host.write_v2(gib(200), gib(20), stat_v2());
  CHECK_EQ(host.available_gib(), std::size_t{64});
}

TEST(a_control_group_that_does_not_say_what_it_uses_is_passed_over) {
  const Host host;
  host.write("sys/fs/cgroup/memory.max", gib(24));
  CHECK_EQ(host.available_gib(), std::size_t{64});
  host.write("sys/fs/cgroup/memory.current", gib(20));  // and no memory.stat: nothing is free
  CHECK_EQ(host.available_gib(), std::size_t{4});
}

}  // namespace
