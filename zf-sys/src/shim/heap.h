// To whom blocks are booked: live and peak bytes by category, and where the blocks of a heap come from.
#pragma once

#include "arena.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

constexpr size_t kCategories = 6;

// The last allocation that a heap of fixed size refused.
struct ZfRefusal {
  uint64_t number; // of refusals so far, this one included
  int64_t asked;
  int64_t free;
  int64_t largest;
  int64_t live[kCategories];
  uint8_t category; // of what was asked for
  const char* phase; // a text that lives for ever; may be null
  size_t phase_length;
};

namespace zf {

// What a thread is doing, in words that live for ever.
struct Phase {
  const char* text = nullptr;
  size_t length = 0;
};

inline Header* header_of(void* data) noexcept {
  return static_cast<Header*>(data) - 1;
}

class Heap {
 public:
  explicit Heap(std::string name) : name_(std::move(name)) {}
  Heap(std::string name, size_t size) : name_(std::move(name)), arena_(std::in_place, size) {}

  // Whether blocks come from an arena. Such heaps keep no freed blocks.
  bool fixed() const noexcept {
    return arena_.has_value();
  }

  // A block from the arena, not booked yet, or an exception that says what is held.
  Header* place(size_t bytes, uint8_t category, Phase phase) {
    const std::lock_guard<std::mutex> lock(arena_lock_);
    Header* header = arena_->take(bytes);
    if (header == nullptr) {
      refuse(bytes, category, phase);
    }
    return header;
  }

  void put_back(Header* header) noexcept {
    const std::lock_guard<std::mutex> lock(arena_lock_);
    arena_->give(header);
  }

  // Size, free bytes and the largest free block; false without an arena.
  bool room(int64_t* size, int64_t* free, int64_t* largest) noexcept {
    if (!fixed()) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(arena_lock_);
    *size = static_cast<int64_t>(arena_->bytes());
    *free = static_cast<int64_t>(arena_->free_bytes());
    *largest = static_cast<int64_t>(arena_->largest());
    return true;
  }

  // The last refusal and its message; false if there was none.
  bool last_refusal(ZfRefusal* out, std::string* text) {
    const std::lock_guard<std::mutex> lock(arena_lock_);
    if (refusal_.number == 0) {
      return false;
    }
    *out = refusal_;
    *text = refusal_text_;
    return true;
  }

  void charge(size_t bytes, uint8_t category) noexcept {
    const auto amount = static_cast<int64_t>(bytes);
    const int64_t total = total_.fetch_add(amount, std::memory_order_relaxed) + amount;
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
    if (fixed()) {
      const std::lock_guard<std::mutex> arena(arena_lock_);
      arena_->trim();
    }
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

  // Call with `arena_lock_` held.
  [[noreturn]] void refuse(size_t bytes, uint8_t category, Phase phase) {
    refusal_.number += 1;
    refusal_.asked = static_cast<int64_t>(bytes);
    refusal_.free = static_cast<int64_t>(arena_->free_bytes());
    refusal_.largest = static_cast<int64_t>(arena_->largest());
    for (size_t i = 0; i < kCategories; ++i) {
      refusal_.live[i] = live_[i].load(std::memory_order_relaxed);
    }
    refusal_.category = category;
    refusal_.phase = phase.text;
    refusal_.phase_length = phase.length;
    const auto text = [](auto number) { return std::to_string(number); };
    refusal_text_ = "heap '" + name_ + "' is full: an allocation of " + text(bytes) + " bytes was wanted, " +
        text(total_.load(std::memory_order_relaxed)) + " bytes are live in " + text(arena_->bytes()) + ", and of the " +
        text(arena_->free_bytes()) + " free bytes the largest block has " + text(arena_->largest());
    throw std::runtime_error(refusal_text_);
  }

  const std::string name_;
  std::mutex arena_lock_;
  std::optional<Arena> arena_;
  ZfRefusal refusal_{};
  std::string refusal_text_;
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

} // namespace zf
