// One address range of fixed size in which blocks are placed first-fit.
//
// The range is a row of chunks without gaps, each a header and its data, in multiples of 64 bytes. Chunks never move, so
// a program can run out of memory while enough of it is free: in pieces that are too small. Free neighbours coalesce at
// once, through the sizes in their headers. Free chunks are the nodes of a treap in the order of addresses in which each
// knows the largest of its subtree, so that the lowest chunk that is large enough is found in logarithmic time.
//
// The system supplies a page when it is first touched, and has it back when the arena is trimmed or goes.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace zf {

class Heap;

constexpr size_t kAlignment = 64;

// In front of the data of every block.
struct alignas(kAlignment) Header {
  Heap* heap; // null for a block made while no heap was current
  size_t bytes; // as asked for
  size_t capacity; // of the data, rounded up
  size_t before; // in an arena: capacity of the chunk in front; unused in the first chunk
  Header* left; // of a free chunk: its subtrees, lower and higher addresses
  Header* right;
  size_t largest; // of a free chunk: the largest capacity in its subtree
  uint8_t category;
  bool free;
};
static_assert(sizeof(Header) == kAlignment, "the data must stay aligned behind the header");

// Not for several threads at once.
class Arena {
 public:
  // `bytes` is rounded down to a multiple of 64 and includes the headers.
  explicit Arena(size_t bytes) : bytes_(bytes / kAlignment * kAlignment) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::runtime_error(
          "the system gives no address range of " + std::to_string(bytes_) + " bytes: " + std::strerror(errno));
    }
    base_ = static_cast<char*>(memory);
    auto* first = reinterpret_cast<Header*>(base_);
    first->capacity = bytes_ - sizeof(Header);
    add(first);
  }

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ~Arena() {
    munmap(base_, bytes_);
  }

  // Data bytes that a block of `bytes` takes, beside its header.
  static size_t round(size_t bytes) noexcept {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // The lowest free chunk with room for `bytes`, cut to size, or null. Sets `capacity` of the header alone.
  Header* take(size_t bytes) noexcept {
    const size_t capacity = round(bytes);
    Header* chunk = first_fit(capacity);
    if (chunk == nullptr) {
      return nullptr;
    }
    remove(chunk);
    // A rest without room for data stays with the block.
    if (chunk->capacity - capacity > sizeof(Header)) {
      const size_t rest = chunk->capacity - capacity - sizeof(Header);
      chunk->capacity = capacity;
      Header* behind = next(chunk);
      behind->capacity = rest;
      behind->before = capacity;
      tell_next(behind);
      add(behind);
    }
    return chunk;
  }

  void give(Header* chunk) noexcept {
    Header* behind = next(chunk);
    if (behind != nullptr && behind->free) {
      remove(behind);
      chunk->capacity += sizeof(Header) + behind->capacity;
    }
    Header* front = previous(chunk);
    if (front != nullptr && front->free) {
      remove(front);
      front->capacity += sizeof(Header) + chunk->capacity;
      chunk = front;
    }
    tell_next(chunk);
    add(chunk);
  }

  // Gives the pages of free chunks back to the system.
  void trim() noexcept {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (auto* chunk = reinterpret_cast<Header*>(base_); chunk != nullptr; chunk = next(chunk)) {
      const auto first = (reinterpret_cast<uintptr_t>(chunk + 1) + page - 1) / page * page;
      const auto end = (reinterpret_cast<uintptr_t>(chunk + 1) + chunk->capacity) / page * page;
      if (chunk->free && first < end) {
        madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
      }
    }
  }

  size_t bytes() const noexcept {
    return bytes_;
  }

  // Data bytes of all free chunks.
  size_t free_bytes() const noexcept {
    return free_;
  }

  // Data bytes of the largest free chunk: the most that `take` can give.
  size_t largest() const noexcept {
    return root_ == nullptr ? 0 : root_->largest;
  }

 private:
  Header* next(Header* chunk) const noexcept {
    char* end = reinterpret_cast<char*>(chunk + 1) + chunk->capacity;
    return end == base_ + bytes_ ? nullptr : reinterpret_cast<Header*>(end);
  }

  Header* previous(Header* chunk) const noexcept {
    char* start = reinterpret_cast<char*>(chunk);
    return start == base_ ? nullptr : reinterpret_cast<Header*>(start - chunk->before) - 1;
  }

  void tell_next(Header* chunk) const noexcept {
    if (Header* behind = next(chunk)) {
      behind->before = chunk->capacity;
    }
  }

  void add(Header* chunk) noexcept {
    chunk->free = true;
    chunk->left = chunk->right = nullptr;
    free_ += chunk->capacity;
    root_ = insert(root_, refresh(chunk));
  }

  void remove(Header* chunk) noexcept {
    chunk->free = false;
    free_ -= chunk->capacity;
    root_ = erase(root_, chunk);
  }

  Header* first_fit(size_t capacity) const noexcept {
    if (largest() < capacity) {
      return nullptr;
    }
    Header* node = root_;
    for (;;) {
      if (node->left != nullptr && node->left->largest >= capacity) {
        node = node->left;
      } else if (node->capacity >= capacity) {
        return node;
      } else {
        node = node->right;
      }
    }
  }

  // Mixed bits of the address (the finaliser of SplitMix64): as good as random for the shape of the tree.
  static uint64_t priority(const Header* node) noexcept {
    uint64_t bits = reinterpret_cast<uintptr_t>(node);
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
    return bits ^ (bits >> 31);
  }

  static Header* refresh(Header* node) noexcept {
    node->largest = node->capacity;
    for (const Header* child : {node->left, node->right}) {
      if (child != nullptr && child->largest > node->largest) {
        node->largest = child->largest;
      }
    }
    return node;
  }

  static Header* insert(Header* tree, Header* node) noexcept {
    if (tree == nullptr) {
      return node;
    }
    if (priority(node) > priority(tree)) {
      split(tree, node, node->left, node->right);
      return refresh(node);
    }
    Header*& side = node < tree ? tree->left : tree->right;
    side = insert(side, node);
    return refresh(tree);
  }

  static Header* erase(Header* tree, Header* node) noexcept {
    if (tree == node) {
      return merge(tree->left, tree->right);
    }
    Header*& side = node < tree ? tree->left : tree->right;
    side = erase(side, node);
    return refresh(tree);
  }

  // The nodes below and above `at`.
  static void split(Header* tree, const Header* at, Header*& low, Header*& high) noexcept {
    if (tree == nullptr) {
      low = high = nullptr;
    } else if (tree < at) {
      low = tree;
      split(tree->right, at, tree->right, high);
      refresh(tree);
    } else {
      high = tree;
      split(tree->left, at, low, tree->left);
      refresh(tree);
    }
  }

  // All of `low` lies below all of `high`.
  static Header* merge(Header* low, Header* high) noexcept {
    if (low == nullptr || high == nullptr) {
      return low == nullptr ? high : low;
    }
    if (priority(low) > priority(high)) {
      low->right = merge(low->right, high);
      return refresh(low);
    }
    high->left = merge(low, high->left);
    return refresh(high);
  }

  const size_t bytes_;
  char* base_ = nullptr;
  Header* root_ = nullptr;
  size_t free_ = 0;
};

} // namespace zf
