// A CPU allocator that books every block to the heap that was current when it was made.
//
// A block is [header][data], and the data begin on a 64-byte boundary. The header says to whom the block is booked, so
// a free from any thread is booked right, and the context of a DataPtr is the data pointer itself, which
// `Allocator::raw_allocate` (used by oneDNN) demands.
//
// A heap of fixed size takes its blocks from an arena of its own, the others from the system.

#include "shim.h"

#include "heap.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

namespace {

using zf::Header;
using zf::header_of;
using zf::Heap;

constexpr uint8_t kOther = 5;
constexpr uint8_t kNone = UINT8_MAX; // no tag is set
constexpr size_t kPage = 4096;
// Blocks from this size on are kept when freed: below it malloc reuses memory well by itself.
constexpr size_t kLarge = size_t{1} << 20;

// Heap and category of a thread, in the form in which libtorch hands thread state on: to the threads on which autograd
// runs deeply nested backward passes, and to those of asynchronous collectives. So their memory is booked to the rank
// that asked for the work.
struct Place final : c10::DebugInfoBase {
  Place(Heap* owner, uint8_t tag) noexcept : heap(owner), category(tag) {
    heap->retain();
  }
  ~Place() override {
    heap->release();
  }
  Heap* const heap;
  const uint8_t category;
};

// One of the two kinds that libtorch itself never uses.
constexpr auto kPlace = c10::DebugInfoKind::TEST_INFO;

thread_local Heap* current_heap = nullptr; // entered on this thread
thread_local uint8_t current_category = kNone; // tagged on this thread
thread_local bool published = false;
thread_local zf::Phase phase;

uint8_t or_other(uint8_t category) noexcept {
  return category == kNone ? kOther : category;
}

// Tells libtorch this thread's heap and category. Out of memory, or between guards of others that do not nest with ours,
// other threads' memory stays unbooked.
void publish() noexcept {
  try {
    if (published) {
      published = false;
      c10::ThreadLocalDebugInfo::_pop(kPlace);
    }
    if (current_heap != nullptr) {
      auto place = std::make_shared<Place>(current_heap, or_other(current_category));
      c10::ThreadLocalDebugInfo::_push(kPlace, std::move(place));
      published = true;
    }
  } catch (...) {
  }
}

void* new_block(size_t capacity) noexcept {
  void* memory = nullptr;
  return posix_memalign(&memory, zf::kAlignment, sizeof(Header) + capacity) == 0 ? memory : nullptr;
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
  if (heap->fixed()) {
    heap->put_back(header);
  } else if (header->capacity >= kLarge) {
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
    uint8_t category = current_category;
    if (heap == nullptr) {
      if (const auto* place = static_cast<Place*>(c10::ThreadLocalDebugInfo::get(kPlace))) {
        heap = place->heap;
        category = category == kNone ? place->category : category;
      }
    }
    category = or_other(category);
    Header* header;
    if (heap == nullptr) {
      header = from_system(nullptr, bytes);
    } else if (heap->fixed()) {
      header = heap->place(bytes, category, phase);
      heap->charge(bytes, category);
      heap->retain();
    } else {
      heap->charge(bytes, category);
      try {
        header = from_system(heap, bytes);
      } catch (...) {
        heap->discharge(bytes, category);
        throw;
      }
      heap->retain();
    }
    header->heap = heap;
    header->bytes = bytes;
    header->category = category;
    return header + 1;
  }

  // A block of the system, for a heap without an arena or for none. Its capacity is set.
  static Header* from_system(Heap* heap, size_t bytes) {
    const bool large = bytes >= kLarge;
    const size_t capacity = large ? (bytes + kPage - 1) / kPage * kPage : bytes;
    if (heap != nullptr) {
      if (Header* kept = large ? heap->reuse(capacity) : nullptr) {
        return kept;
      }
      heap->make_room();
    }
    void* memory = new_block(capacity);
    if (memory == nullptr && heap != nullptr) {
      heap->drop_kept(false);
      memory = new_block(capacity);
    }
    if (memory == nullptr) {
      throw std::runtime_error("the system has no memory for an allocation of " + std::to_string(bytes) + " bytes");
    }
    auto* header = static_cast<Header*>(memory);
    header->capacity = capacity;
    return header;
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

// A negative size makes a heap without an arena.
ZfMessage zf_heap_new(const char* name, size_t length, int64_t size, void** out) noexcept {
  return zf::guarded([&] {
    std::string text(name, length);
    *out = size < 0 ? new Heap(std::move(text)) : new Heap(std::move(text), static_cast<size_t>(size));
  });
}

void zf_heap_release(void* heap) noexcept {
  auto* self = static_cast<Heap*>(heap);
  self->drop_kept(true);
  self->release();
}

void* zf_heap_enter(void* heap) noexcept {
  void* before = current_heap;
  current_heap = static_cast<Heap*>(heap);
  publish();
  return before;
}

uint8_t zf_heap_tag(uint8_t category) noexcept {
  const uint8_t before = current_category;
  current_category = category < kCategories ? category : kNone;
  if (current_heap != nullptr && current_category != before) {
    publish();
  }
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

bool zf_heap_room(void* heap, int64_t* size, int64_t* free, int64_t* largest) noexcept {
  return static_cast<Heap*>(heap)->room(size, free, largest);
}

// `text` stays null where nothing was refused.
ZfMessage zf_heap_refusal(void* heap, ZfRefusal* out, ZfMessage* text) noexcept {
  return zf::guarded([&] {
    std::string words;
    if (static_cast<Heap*>(heap)->last_refusal(out, &words)) {
      *text = zf::message(words.c_str());
    }
  });
}

// Names what the thread is doing, for refusals. The text must live for ever.
void zf_heap_phase(const char* text, size_t length, const char** before, size_t* before_length) noexcept {
  *before = phase.text;
  *before_length = phase.length;
  phase = {text, length};
}

void zf_heap_reset_peak(void* heap) noexcept {
  static_cast<Heap*>(heap)->reset_peak();
}

void zf_heap_drop_cached(void* heap) noexcept {
  static_cast<Heap*>(heap)->drop_kept(false);
}

} // extern "C"
