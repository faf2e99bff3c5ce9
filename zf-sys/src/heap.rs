//! A CPU allocator that books every block to a heap, by category, with a peak and an optional limit.
//!
//! Each rank thread enters its own [`Heap`]; what it allocates from then on is booked there, under the category of the
//! innermost [`tag`]. A block remembers its heap and category, so that a free from any thread is booked right. CPU
//! backward runs on the thread that called it, so its memory is booked to that thread's heap too.
//!
//! Bytes are those the tensor asked for. A block takes 64 bytes more for its header, and blocks of 1 MiB and more are
//! rounded up to a page; neither is counted.

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use tch::Tensor;

use crate::{Error, Result, ffi};

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
    /// bytes together never exceed the most that was ever live.
    pub cached: i64,
}

/// Installs the allocator for CPU tensors. Idempotent; [`Heap::new`] calls it.
///
/// Best before the first tensor. Blocks of the former allocator stay valid, they are only not counted.
///
/// # Errors
///
/// If another allocator with a higher priority is installed.
pub fn install() -> Result<()> {
    static INSTALLED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            // SAFETY: the call has no arguments and runs once. The default allocator is asked for by name in libtorch's
            // own code at each allocation, so that a change of it is seen by all.
            let message = unsafe { ffi::zf_heap_install() };
            if message.is_null() { Ok(()) } else { Err(ffi::take_text(message)) }
        })
        .clone()
        .map_err(|message| Error::Libtorch { call: "heap::install", message })
}

/// A place to which CPU allocations are booked. A clone is another handle of the same heap.
#[derive(Clone)]
pub struct Heap {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<c_void>,
    name: String,
    limit: Option<i64>,
}

// SAFETY: the C++ side uses atomics and locks for everything that changes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: this was the last handle. Blocks still alive hold references of their own on the C++ side.
        unsafe { ffi::zf_heap_release(self.raw.as_ptr()) }
    }
}

impl Heap {
    /// A heap without a limit. The name appears in errors and reports.
    ///
    /// # Errors
    ///
    /// If the allocator cannot be installed.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        Self::make(name.into(), None)
    }

    /// A heap that refuses to hold more than `bytes` live bytes: an allocation beyond it fails with an error that names
    /// heap, wanted bytes, live bytes and limit, and comes out of `tch`'s `f_…` functions as an `Err`.
    ///
    /// # Errors
    ///
    /// If the allocator cannot be installed, or `bytes` does not fit an `i64`.
    pub fn with_limit(name: impl Into<String>, bytes: usize) -> Result<Self> {
        let limit = i64::try_from(bytes).map_err(|_| Error::Argument {
            call: "Heap::with_limit",
            message: format!("the limit {bytes} is above {} bytes", i64::MAX),
        })?;
        Self::make(name.into(), Some(limit))
    }

    fn make(name: String, limit: Option<i64>) -> Result<Self> {
        install()?;
        let mut raw = ptr::null_mut();
        // SAFETY: pointer and length describe `name`, which is copied; `raw` is a valid place.
        let message = unsafe { ffi::zf_heap_new(name.as_ptr().cast(), name.len(), limit.unwrap_or(-1), &mut raw) };
        ffi::check("Heap::new", message)?;
        let raw = NonNull::new(raw).expect("zf_heap_new writes a heap when it succeeds");
        Ok(Self { inner: Arc::new(Inner { raw, name, limit }) })
    }

    /// The name given at construction.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The limit in live bytes, if there is one.
    #[must_use]
    pub fn limit(&self) -> Option<i64> {
        self.inner.limit
    }

    /// Makes this the calling thread's heap until the guard is dropped. Guards nest.
    #[must_use = "the heap is left again when the guard is dropped"]
    pub fn enter(&self) -> HeapGuard {
        HeapGuard { before: set_current(Some(self.clone())), _thread: PhantomData }
    }

    /// The calling thread's heap.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(|current| current.0.clone())
    }

    /// What the heap holds now and has held.
    #[must_use]
    pub fn stats(&self) -> HeapStats {
        let mut stats = HeapStats::default();
        // SAFETY: both arrays have six entries, as the C++ side writes.
        unsafe {
            ffi::zf_heap_stats(
                self.inner.raw.as_ptr(),
                stats.live.0.as_mut_ptr(),
                stats.at_peak.0.as_mut_ptr(),
                &mut stats.peak,
                &mut stats.cached,
            );
        }
        stats
    }

    /// Starts a new peak from what is live now.
    pub fn reset_peak(&self) {
        // SAFETY: the heap is alive.
        unsafe { ffi::zf_heap_reset_peak(self.inner.raw.as_ptr()) }
    }

    /// Gives the cached blocks back to the system.
    pub fn release_cached(&self) {
        // SAFETY: the heap is alive.
        unsafe { ffi::zf_heap_drop_cached(self.inner.raw.as_ptr()) }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Heap")
            .field("name", &self.inner.name)
            .field("limit", &self.inner.limit)
            .field("stats", &self.stats())
            .finish()
    }
}

/// The thread's heap, which the C++ side knows by a bare pointer.
struct Current(Option<Heap>);

impl Drop for Current {
    fn drop(&mut self) {
        // The thread ends, perhaps with a guard that was forgotten: the pointer must not outlive the handle.
        // SAFETY: null means no heap.
        unsafe { ffi::zf_heap_enter(ptr::null_mut()) };
    }
}

thread_local! {
    static CURRENT: RefCell<Current> = const { RefCell::new(Current(None)) };
}

fn set_current(heap: Option<Heap>) -> Option<Heap> {
    let raw = heap.as_ref().map_or(ptr::null_mut(), |heap| heap.inner.raw.as_ptr());
    // SAFETY: `CURRENT` keeps the heap alive from the next line on, for as long as it is the thread's heap; nothing is
    // allocated between the two.
    unsafe { ffi::zf_heap_enter(raw) };
    CURRENT.with_borrow_mut(|current| std::mem::replace(&mut current.0, heap))
}

/// Restores the thread's former heap when dropped.
#[derive(Debug)]
pub struct HeapGuard {
    before: Option<Heap>,
    /// The current heap belongs to the thread, so the guard must stay there.
    _thread: PhantomData<*const ()>,
}

impl Drop for HeapGuard {
    fn drop(&mut self) {
        set_current(self.before.take());
    }
}

/// Books the calling thread's allocations under `category` until the guard is dropped. Guards nest; without one the
/// category is [`Category::Other`].
#[must_use = "the former category returns when the guard is dropped"]
pub fn tag(category: Category) -> TagGuard {
    // SAFETY: any value is accepted.
    TagGuard { before: unsafe { ffi::zf_heap_tag(category as u8) }, _thread: PhantomData }
}

/// Books the memory of a tensor, with all its views, under another category: for memory that others allocated, such as
/// a gradient that autograd made. Memory of another allocator is left alone.
///
/// The tensor's storage must not be in use by another thread.
///
/// # Errors
///
/// If the tensor has no storage.
pub fn retag(tensor: &Tensor, category: Category) -> Result<()> {
    // SAFETY: the handle lives during the call.
    ffi::check("heap::retag", unsafe { ffi::zf_heap_retag(ffi::raw(tensor), category as u8) })
}

/// Restores the thread's former category when dropped.
#[derive(Debug)]
pub struct TagGuard {
    before: u8,
    _thread: PhantomData<*const ()>,
}

impl Drop for TagGuard {
    fn drop(&mut self) {
        // SAFETY: any value is accepted.
        unsafe { ffi::zf_heap_tag(self.before) };
    }
}
