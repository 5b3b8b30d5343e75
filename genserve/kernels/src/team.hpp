// team.hpp: the threads that compute a node together, and their shared memory.
//
// A node is computed in phases, a phase in chunks. All threads run the same code: a thread takes chunks of the current
// phase until none is left, waits for the chunks of the others, and goes on to the next phase. A thread without a chunk
// is never waited for, so that one thread alone finishes, and a late one finds the phases done. A thread that waits
// prefetches what it will read next.
//
//     thread 0   | chunk 0 | chunk 2 | chunk 3 |-wait-| chunk 0 | chunk 1 |
//     thread 1        | chunk 1      | chunk 4 |      | chunk 2 |
//                 phase 0                              phase 1
//
// The threads are those of ONNX Runtime; tests have their own.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#include <malloc.h>
#include <windows.h>
#else
#include <sched.h>
#include <unistd.h>
#endif

namespace genserve {

constexpr int kMaxRanges = 8;

// A number or pointer shared by threads, like std::atomic but without the headers of a C++ library.
template <class T>
class Atomic {
 public:
  T load() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }
  T peek() const { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }
  T add(T more) { return __atomic_fetch_add(&value_, more, __ATOMIC_ACQ_REL); }
  T exchange(T next) { return __atomic_exchange_n(&value_, next, __ATOMIC_ACQ_REL); }
  bool replace(T expected, T next) {
    return __atomic_compare_exchange_n(&value_, &expected, next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }

 private:
  T value_{};
};

// Waits briefly: a pause instruction at first, later a yield, since another thread may need this core.
inline void wait_a_moment(int turn) {
  if (turn >= 4096) {
#if defined(_WIN32)
    SwitchToThread();
#else
    sched_yield();
#endif
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// The number of cores that this process may use, at least one.
inline int count_cores() {
#if defined(_WIN32)
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return (int)info.dwNumberOfProcessors;
#elif defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
#if !defined(_WIN32)
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores < 1 ? 1 : (int)cores;
#endif
}

// Memory that a thread will read, in slices that it prefetches while it waits.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const char* at, int64_t bytes) : at_(at), end_(at + bytes) {}

  // Prefetches the next slice into the L2 cache; false: there is none.
  bool next() {
    if (at_ >= end_) return false;
    for (int line = 0; line < 8; line++) __builtin_prefetch(at_ + 64 * line, 0, 2);
    at_ += 8 * 64;
    return true;
  }

 private:
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

struct alignas(128) Counter {  // counters written by many threads have separate cache lines
  Atomic<int64_t> value;
};

// The progress of a phase.
struct Phase {
  Counter next[kMaxRanges];
  Counter done;
};

class Team {
 public:
  // `phases` are all zero at the start.
  explicit Team(Phase* phases) : phases_(phases) {}

  // The team for a part of the work whose phases begin at `phase`, and are numbered from 0 again.
  Team from(int phase) const { return Team(phases_ + phase); }

  // Takes chunks 0 .. chunks - 1 of a phase together with the other threads, until none is left. Every thread goes
  // through the phases in the same order.
  template <class Body>
  void take(int phase, int64_t chunks, Body&& body) {
    Phase& p = phases_[phase];
    Atomic<int64_t>& next = p.next[0].value;
    if (next.peek() >= chunks) return;
    for (int64_t chunk; (chunk = next.add(1)) < chunks;) {
      body(chunk);
      p.done.value.add(1);
    }
  }

  // The same where a thread is to know the chunk that it takes next, so that it can prefetch it: thread `index` of `count`
  // starts with its own range of chunks, and then helps with those of others.
  template <class Body>
  void take_ranges(int phase, int64_t chunks, size_t index, int count, Body&& body) {
    const int ranges = num_ranges(count);
    const auto start = [&](int range) { return range_start(chunks, range, ranges); };
    const auto size_of = [&](int range) { return start(range + 1) - start(range); };
    take_own(phase, index, ranges, size_of, [&](int range, int64_t i) { body(start(range) + i); });
  }

  // The same, but the chunks are dealt: the own ones of a thread are `stride(count)` apart.
  template <class Body>
  void take_dealt(int phase, int64_t chunks, size_t index, int count, Body&& body) {
    const int ranges = num_ranges(count);
    const auto size_of = [&](int range) { return (chunks - range + ranges - 1) / ranges; };
    take_own(phase, index, ranges, size_of, [&](int range, int64_t i) { body(range + i * ranges); });
  }
  static int64_t stride(int count) { return num_ranges(count); }

  // Waits until all chunks of a phase are done. After the last phase this is not needed, because the caller of the
  // threads waits for them.
  void wait(int phase, int64_t chunks, Prefetch& prefetch) {
    for (int turn = 0; phases_[phase].done.value.load() < chunks;) {
      if (!prefetch.next()) wait_a_moment(turn++);
    }
  }

  // The first chunk that a thread takes in `take_ranges`.
  static int64_t first_chunk(int64_t chunks, size_t index, int count) {
    return range_start(chunks, (int)(index % (size_t)num_ranges(count)), num_ranges(count));
  }

 private:
  // Takes the chunks of all ranges, those of the thread's own one first: body(range, i) for each i below size_of(range).
  template <class Size, class Body>
  void take_own(int phase, size_t index, int ranges, Size&& size_of, Body&& body) {
    Phase& p = phases_[phase];
    int64_t taken = 0;
    for (int i = 0; i < ranges; i++) {
      const int range = (int)((index + (size_t)i) % (size_t)ranges);
      const int64_t size = size_of(range);
      Atomic<int64_t>& next = p.next[range].value;
      if (next.peek() >= size) continue;
      for (int64_t chunk; (chunk = next.add(1)) < size; taken++) body(range, chunk);
    }
    if (taken > 0) p.done.value.add(taken);
  }

  static int num_ranges(int count) { return count < kMaxRanges ? count : kMaxRanges; }
  static int64_t range_start(int64_t chunks, int range, int ranges) { return chunks * range / ranges; }

  Phase* phases_;
};

// The threads of a kernel: `parallel_for` calls work(job, i) for each i below `count`, on any threads, and returns when
// all calls have returned. Null: only the caller's thread.
struct Threads {
  void (*parallel_for)(void* host, size_t count, void (*work)(void* job, size_t index), void* job) = nullptr;
  void* host = nullptr;
  int count = 1;

  // Calls work(index) on all threads, but on no more than there is work for.
  template <class Work>
  void run(int64_t useful, Work& work) const {
    const int64_t threads = useful < count ? useful : count;
    if (parallel_for == nullptr || threads <= 1) return work(0);
    parallel_for(host, (size_t)threads, [](void* job, size_t index) { (*static_cast<Work*>(job))(index); }, &work);
  }
};

// Calls body(first, end) for parts of `rows` rows of `columns` floats, on all threads. A part takes about as long as waking
// a thread.
template <class Body>
void take_parts(int64_t rows, int64_t columns, const Threads& threads, const Body& body) {
  constexpr int64_t kFloats = 16384;
  const int64_t size = columns < kFloats ? kFloats / columns : 1, parts = (rows + size - 1) / size;
  Phase phase[1]{};
  auto work = [&](size_t) {
    Team(phase).take(0, parts, [&](int64_t part) {
      const int64_t first = part * size;
      body(first, first + size < rows ? first + size : rows);
    });
  };
  threads.run(parts, work);
}

// Memory for intermediate results, borrowed from a pool of the process until the end of the scope. Concurrent sessions
// get separate memory; the consecutive nodes of a session get the same memory, which is warm in cache. The block that was
// returned last is borrowed first. Parts of a node that return their blocks in the reverse order thus get the same ones in
// the next node; otherwise every block would grow to the size of the largest.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(size_t bytes) { open(bytes); }
  ~Scratch() {
    if (block_ == nullptr) return;
    for (int i = 0; i < kKept && !kExact; i++) {
      if (store()[i].replace(nullptr, block_)) return;
    }
    free_aligned(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Borrows the memory; once.
  void open(size_t bytes) {
    Store& kept = store();
    for (int i = kKept; i-- > 0 && block_ == nullptr;) {
      if (kept[i].peek() != nullptr) block_ = kept[i].exchange(nullptr);
    }
    if (block_ != nullptr && block_->size >= bytes) return;
    free_aligned(block_);
    const size_t size = kExact ? bytes : (bytes + bytes / 4 + 4095) / 4096 * 4096;
    block_ = static_cast<Block*>(allocate_aligned(size + sizeof(Block)));
    if (block_ != nullptr) block_->size = size;
  }

  // False: out of memory.
  explicit operator bool() const { return block_ != nullptr; }

  // The next `count` values, aligned to a cache line. The constructor's size is the sum of `bytes_of` of all parts.
  template <class T>
  T* take(size_t count) {
    char* at = reinterpret_cast<char*>(block_ + 1) + used_;
    used_ += bytes_of<T>(count);
    return reinterpret_cast<T*>(at);
  }
  template <class T>
  static constexpr size_t bytes_of(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  struct alignas(64) Block {
    size_t size;
  };
  // The address sanitizer sees only accesses beyond a block, so under it each block is new and as large as requested.
#if __has_feature(address_sanitizer)
  static constexpr bool kExact = true;
#else
  static constexpr bool kExact = false;
#endif
  static constexpr int kKept = 32;
  using Store = Atomic<Block*>[kKept];
  static Store& store() {
    static Store kept;
    return kept;
  }
  static void* allocate_aligned(size_t size) {
#if defined(_WIN32)
    return _aligned_malloc(size, 64);
#else
    void* block = nullptr;
    return posix_memalign(&block, 64, size) == 0 ? block : nullptr;
#endif
  }
  static void free_aligned(void* block) {
#if defined(_WIN32)
    _aligned_free(block);
#else
    free(block);
#endif
  }

  Block* block_ = nullptr;
  size_t used_ = 0;
};

}  // namespace genserve
