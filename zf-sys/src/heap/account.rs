//! The figures of a heap.

use std::fmt;
use std::ops::{Index, IndexMut};

use crate::ffi::RawRefusal;

/// What a block of memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Category {
    /// Model parameters, in the dtype used for computing.
    Parameters,
    /// Gradients and their accumulators.
    Gradients,
    /// Master parameters and moments.
    Optimizer,
    /// What forward leaves for backward, and the temporaries of both.
    Activations,
    /// Communication and staging buffers.
    Buffers,
    /// Everything that no tag names.
    Other,
}

impl Category {
    /// All categories, in the order of their index.
    pub const ALL: [Self; 6] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Activations, Self::Buffers, Self::Other];

    /// The name used in reports, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Buffers => "buffers",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Bytes for each category, indexed by [`Category`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByCategory(pub [i64; 6]);

impl ByCategory {
    /// The sum over all categories, in bytes.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.0.iter().sum()
    }
}

impl Index<Category> for ByCategory {
    type Output = i64;

    fn index(&self, category: Category) -> &i64 {
        &self.0[category as usize]
    }
}

impl IndexMut<Category> for ByCategory {
    fn index_mut(&mut self, category: Category) -> &mut i64 {
        &mut self.0[category as usize]
    }
}

/// What a heap holds and has held, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapStats {
    /// Live bytes by category.
    pub live: ByCategory,
    /// The largest total of live bytes since the heap was made or its peak was reset.
    pub peak: i64,
    /// How the peak was made up. Exact while one thread uses the heap; with several threads at the very moment of a
    /// peak it may miss blocks that others allocated or freed then.
    pub at_peak: ByCategory,
    /// Freed blocks of 1 MiB and more that are kept for the next allocation of the same size. Not live. Live and cached
    /// bytes together never exceed the most that was ever live. A heap of fixed size keeps none.
    pub cached: i64,
    /// What is free in a heap of fixed size.
    pub room: Option<Room>,
}

/// What is free in a heap of fixed size, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes of the whole heap.
    pub size: i64,
    /// Bytes of all free blocks, without their headers.
    pub free: i64,
    /// Bytes of the largest free block: the most that one allocation can have.
    pub largest_free: i64,
}

impl Room {
    /// The largest free block over all free bytes: 1 where these are in one piece, and also where nothing is free. The
    /// measure of fragmentation of ZeRO-R's memory defragmentation (Rajbhandari et al., section 6.3).
    #[must_use]
    pub fn contiguity(&self) -> f64 {
        if self.free == 0 { 1.0 } else { self.largest_free as f64 / self.free as f64 }
    }
}

/// An allocation that a heap of fixed size refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// How many the heap has refused by then, this one included.
    pub number: u64,
    /// Bytes wanted.
    pub asked: i64,
    /// The category under which they would have been booked.
    pub category: Category,
    /// What the thread was doing, as [`phase`](super::phase) named it.
    pub phase: Option<&'static str>,
    /// Live bytes at that moment.
    pub live: ByCategory,
    /// What was free at that moment.
    pub room: Room,
    /// The text with which the allocation failed; part of the error that came out of libtorch.
    pub message: String,
}

impl Refusal {
    /// # Safety
    ///
    /// The phase of `raw` must be null or a text that lives for ever.
    pub(crate) unsafe fn new(raw: &RawRefusal, size: i64, message: String) -> Self {
        let phase = (!raw.phase.is_null()).then(|| {
            // SAFETY: as the caller promises.
            unsafe { std::slice::from_raw_parts(raw.phase.cast::<u8>(), raw.phase_length) }
        });
        Self {
            number: raw.number,
            asked: raw.asked,
            category: Category::ALL.get(usize::from(raw.category)).copied().unwrap_or(Category::Other),
            phase: phase.and_then(|bytes| std::str::from_utf8(bytes).ok()),
            live: ByCategory(raw.live),
            room: Room { size, free: raw.free, largest_free: raw.largest },
            message,
        }
    }

    /// Whether it would have found a place, had all that was free been in one piece.
    #[must_use]
    pub fn is_fragmentation(&self) -> bool {
        self.asked <= self.room.free
    }
}
