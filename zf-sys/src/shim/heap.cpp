// A CPU allocator that books every block to the heap that was current when it was made.
//
// A block is [header][data], and the data begin on a 64-byte boundary. The header says to whom the block is booked, so
// a free from any thread is booked right, and the context of a DataPtr is the data pointer itself, which
// `Allocator::raw_allocate` (used by oneDNN) demands.

#include "shim.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

constexpr size_t kCategories = 6;
constexpr uint8_t kOther = 5;
constexpr size_t kAlignment = 64;
constexpr size_t kPage = 4096;
// Blocks from this size on are kept when freed: below it malloc reuses memory well by itself.
constexpr size_t kLarge = size_t{1} << 20;
constexpr int64_t kUnlimited = INT64_MAX;

class Heap;

struct alignas(kAlignment) Header {
  Heap* heap; // null for a block made while no heap was current
  size_t bytes; // as asked for
  size_t capacity; // of the data, rounded up
  uint8_t category;
};
static_assert(sizeof(Header) == kAlignment, "the data must stay aligned behind the header");

Header* header_of(void* data) noexcept {
  return static_cast<Header*>(data) - 1;
}

class Heap {
 public:
  Heap(std::string name, int64_t limit) : name_(std::move(name)), limit_(limit) {}

  // Books `bytes`, or throws when that would pass the limit.
  void charge(size_t bytes, uint8_t category) {
    const auto amount = static_cast<int64_t>(bytes);
    int64_t total;
    if (limit_ == kUnlimited) {
      total = total_.fetch_add(amount, std::memory_order_relaxed) + amount;
    } else {
      int64_t before = total_.load(std::memory_order_relaxed);
      do {
        if (amount > limit_ - before) {
          throw std::runtime_error(
              "heap '" + name_ + "' is full: an allocation of " + std::to_string(bytes) + " bytes was wanted, " +
              std::to_string(before) + " bytes are live and the limit is " + std::to_string(limit_) + " bytes");
        }
      } while (!total_.compare_exchange_weak(before, before + amount, std::memory_order_relaxed));
      total = before + amount;
    }
    live_[category].fetch_add(amount, std::memory_order_relaxed);
    raise(high_, total);
    if (raise(peak_, total)) {
      // The split by category is taken when the total next falls (or is asked for): until then it can only be the
      // split of a higher peak. So a growing heap pays one store an allocation and no lock.
      unsplit_.store(true, std::memory_order_release);
    }
  }

  void discharge(size_t bytes, uint8_t category) noexcept {
    if (unsplit_.load(std::memory_order_acquire)) {
      split();
    }
    live_[category].fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    total_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }

  // Books a live block under another category. The split at the peak follows: the bytes were always of that kind.
  void move(size_t bytes, uint8_t from, uint8_t to) noexcept {
    live_[from].fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    live_[to].fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }

  // A kept block of exactly this capacity, or null.
  Header* reuse(size_t capacity) noexcept {
    const std::lock_guard<std::mutex> lock(kept_lock_);
    for (size_t i = kept_.size(); i-- > 0;) {
      Header* header = kept_[i];
      if (header->capacity == capacity) {
        kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(i));
        cached_.fetch_sub(static_cast<int64_t>(header->bytes), std::memory_order_relaxed);
        return header;
      }
    }
    return nullptr;
  }

  // Makes room for a new block that is booked already.
  void make_room() noexcept {
    if (cached_.load(std::memory_order_relaxed) > 0 && above_high()) {
      const std::lock_guard<std::mutex> lock(kept_lock_);
      trim();
    }
  }

  // Keeps a freed block if that does not raise the memory held above what was once live.
  void keep(Header* header) noexcept {
    const std::lock_guard<std::mutex> lock(kept_lock_);
    if (closed_) {
      std::free(header);
      return;
    }
    try {
      kept_.push_back(header);
    } catch (...) {
      std::free(header);
      return;
    }
    cached_.fetch_add(static_cast<int64_t>(header->bytes), std::memory_order_relaxed);
    trim();
  }

  void drop_kept(bool close) noexcept {
    const std::lock_guard<std::mutex> lock(kept_lock_);
    closed_ = closed_ || close;
    for (Header* header : kept_) {
      std::free(header);
    }
    kept_.clear();
    cached_.store(0, std::memory_order_relaxed);
  }

  void reset_peak() noexcept {
    peak_.store(total_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    unsplit_.store(true, std::memory_order_release);
  }

  void stats(int64_t* live, int64_t* at_peak, int64_t* peak, int64_t* cached) noexcept {
    if (unsplit_.load(std::memory_order_acquire)) {
      split();
    }
    const std::lock_guard<std::mutex> lock(split_lock_);
    for (size_t i = 0; i < kCategories; ++i) {
      live[i] = live_[i].load(std::memory_order_relaxed);
      at_peak[i] = at_peak_[i];
    }
    *peak = peak_.load(std::memory_order_relaxed);
    *cached = cached_.load(std::memory_order_relaxed);
  }

  void retain() noexcept {
    references_.fetch_add(1, std::memory_order_relaxed);
  }

  // The owner and every live block hold one reference each.
  void release() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete this;
    }
  }

 private:
  static bool raise(std::atomic<int64_t>& mark, int64_t value) noexcept {
    int64_t seen = mark.load(std::memory_order_relaxed);
    while (seen < value) {
      if (mark.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

  void split() noexcept {
    const std::lock_guard<std::mutex> lock(split_lock_);
    if (unsplit_.exchange(false, std::memory_order_acq_rel)) {
      for (size_t i = 0; i < kCategories; ++i) {
        at_peak_[i] = live_[i].load(std::memory_order_relaxed);
      }
    }
  }

  bool above_high() const noexcept {
    return total_.load(std::memory_order_relaxed) + cached_.load(std::memory_order_relaxed) >
        high_.load(std::memory_order_relaxed);
  }

  // Gives the oldest kept blocks back until live and kept bytes together are no more than were once live. Call with
  // `kept_lock_` held.
  void trim() noexcept {
    size_t gone = 0;
    while (gone < kept_.size() && above_high()) {
      Header* header = kept_[gone++];
      cached_.fetch_sub(static_cast<int64_t>(header->bytes), std::memory_order_relaxed);
      std::free(header);
    }
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(gone));
  }

  const std::string name_;
  const int64_t limit_;
  std::atomic<int64_t> references_{1};
  std::array<std::atomic<int64_t>, kCategories> live_{};
  std::atomic<int64_t> total_{0};
  std::atomic<int64_t> peak_{0}; // since the last reset
  std::atomic<int64_t> high_{0}; // ever
  std::atomic<bool> unsplit_{false};
  std::mutex split_lock_;
  std::array<int64_t, kCategories> at_peak_{};
  std::atomic<int64_t> cached_{0};
  std::mutex kept_lock_;
  std::vector<Header*> kept_; // oldest first
  bool closed_ = false;
};

thread_local Heap* current_heap = nullptr;
thread_local uint8_t current_category = kOther;

void* new_block(size_t capacity) noexcept {
  void* memory = nullptr;
  return posix_memalign(&memory, kAlignment, sizeof(Header) + capacity) == 0 ? memory : nullptr;
}

void free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  Header* header = header_of(data);
  Heap* heap = header->heap;
  if (heap == nullptr) {
    std::free(header);
    return;
  }
  heap->discharge(header->bytes, header->category);
  if (header->capacity >= kLarge) {
    heap->keep(header);
  } else {
    std::free(header);
  }
  heap->release();
}

class HeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : allocate_block(bytes);
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }

 private:
  static void* allocate_block(size_t bytes) {
    // A negative size that was converted on its way here, or one that the rounding below would overflow.
    if (bytes > static_cast<size_t>(INT64_MAX) - 2 * kPage) {
      throw std::runtime_error("an allocation of " + std::to_string(bytes) + " bytes is not possible");
    }
    Heap* heap = current_heap;
    const uint8_t category = current_category;
    const bool large = bytes >= kLarge;
    const size_t capacity = large ? (bytes + kPage - 1) / kPage * kPage : bytes;
    Header* header = nullptr;
    if (heap != nullptr) {
      heap->charge(bytes, category);
      if (large) {
        header = heap->reuse(capacity);
      }
    }
    if (header == nullptr) {
      if (heap != nullptr) {
        heap->make_room();
      }
      void* memory = new_block(capacity);
      if (memory == nullptr && heap != nullptr) {
        heap->drop_kept(false);
        memory = new_block(capacity);
      }
      if (memory == nullptr) {
        if (heap != nullptr) {
          heap->discharge(bytes, category);
        }
        throw std::runtime_error("the system has no memory for an allocation of " + std::to_string(bytes) + " bytes");
      }
      header = static_cast<Header*>(memory);
    }
    if (heap != nullptr) {
      heap->retain();
    }
    *header = Header{heap, bytes, capacity, category};
    return header + 1;
  }
};

} // namespace

extern "C" {

ZfMessage zf_heap_install() noexcept {
  return zf::guarded([] {
    // Never freed: blocks may outlive any order of static destructors.
    static auto* allocator = new HeapAllocator();
    c10::SetCPUAllocator(allocator, /*priority=*/200);
    TORCH_CHECK(c10::GetCPUAllocator() == allocator, "another CPU allocator with a higher priority is installed");
  });
}

ZfMessage zf_heap_new(const char* name, size_t length, int64_t limit, void** out) noexcept {
  return zf::guarded([&] { *out = new Heap(std::string(name, length), limit < 0 ? kUnlimited : limit); });
}

void zf_heap_release(void* heap) noexcept {
  auto* self = static_cast<Heap*>(heap);
  self->drop_kept(true);
  self->release();
}

void* zf_heap_enter(void* heap) noexcept {
  void* before = current_heap;
  current_heap = static_cast<Heap*>(heap);
  return before;
}

uint8_t zf_heap_tag(uint8_t category) noexcept {
  const uint8_t before = current_category;
  current_category = category < kCategories ? category : kOther;
  return before;
}

ZfMessage zf_heap_retag(ZfTensor tensor, uint8_t category) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(tensor->defined() && tensor->has_storage(), "the tensor has no storage");
    const c10::DataPtr& data = tensor->storage().data_ptr();
    if (data.get() == nullptr || data.get_deleter() != &free_block || category >= kCategories) {
      return;
    }
    Header* header = header_of(data.get());
    if (header->heap != nullptr) {
      header->heap->move(header->bytes, header->category, category);
    }
    header->category = category;
  });
}

void zf_heap_stats(void* heap, int64_t* live, int64_t* at_peak, int64_t* peak, int64_t* cached) noexcept {
  static_cast<Heap*>(heap)->stats(live, at_peak, peak, cached);
}

void zf_heap_reset_peak(void* heap) noexcept {
  static_cast<Heap*>(heap)->reset_peak();
}

void zf_heap_drop_cached(void* heap) noexcept {
  static_cast<Heap*>(heap)->drop_kept(false);
}

} // extern "C"
