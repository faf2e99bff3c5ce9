//! A CPU allocator that books every block to a heap, by category, with a peak; a heap may have a fixed size.
//!
//! Each rank thread enters its own [`Heap`]; what it allocates from then on is booked there, under the category of the
//! innermost [`tag`]. A block remembers its heap and category, so that a free from any thread is booked right. The heap
//! follows the rank where libtorch hands work on: to the threads that run deeply nested backward passes, and to those of
//! asynchronous collectives, under the category in force when the work was asked for.
//!
//! Bytes are those the tensor asked for. A block takes 64 bytes more for its header. In a heap without a limit blocks of
//! 1 MiB and more are rounded up to a page, and neither is counted. In one of fixed size ([`Heap::with_limit`]) blocks are
//! rounded up to 64 bytes, and both come out of its size, though not into live bytes.

use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use tch::Tensor;

use crate::{Error, Result, ffi};

mod account;

pub use account::{ByCategory, Category, HeapStats, Refusal, Room};

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

    /// A heap of `bytes` bytes, rounded down to a multiple of 64, at least [`Heap::SMALLEST`]: one address range in which
    /// blocks are placed first-fit. Each takes its size rounded up to 64 bytes, and 64 more for its header. Blocks do not
    /// move, so that an allocation may fail although enough is free in pieces; see [`Room`].
    ///
    /// The range is reserved at once; the system supplies pages as they are touched, and has them back when the heap or
    /// [`Heap::release_cached`] lets go of them.
    ///
    /// An allocation that finds no place comes out of `tch`'s `f_…` functions as an `Err`, whose text is the message of
    /// [`Heap::last_refusal`].
    ///
    /// # Errors
    ///
    /// If the allocator cannot be installed, `bytes` is too small, or the system has no address range of that size.
    pub fn with_limit(name: impl Into<String>, bytes: usize) -> Result<Self> {
        let size = i64::try_from(bytes).ok().filter(|_| bytes >= Self::SMALLEST).ok_or_else(|| Error::Argument {
            call: "Heap::with_limit",
            message: format!("expected a size from {} to {} bytes, found {bytes}", Self::SMALLEST, i64::MAX),
        })?;
        Self::make(name.into(), Some(size))
    }

    /// The smallest size for [`Heap::with_limit`], in bytes.
    pub const SMALLEST: usize = 4096;

    fn make(name: String, size: Option<i64>) -> Result<Self> {
        install()?;
        let mut raw = ptr::null_mut();
        // SAFETY: pointer and length describe `name`, which is copied; `raw` is a valid place.
        let message = unsafe { ffi::zf_heap_new(name.as_ptr().cast(), name.len(), size.unwrap_or(-1), &mut raw) };
        ffi::check("Heap::new", message)?;
        let raw = NonNull::new(raw).expect("zf_heap_new writes a heap when it succeeds");
        Ok(Self { inner: Arc::new(Inner { raw, name }) })
    }

    /// The name given at construction.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The size in bytes, if it is fixed.
    #[must_use]
    pub fn limit(&self) -> Option<i64> {
        self.room().map(|room| room.size)
    }

    /// What is free, if the size is fixed.
    #[must_use]
    pub fn room(&self) -> Option<Room> {
        let mut room = Room::default();
        // SAFETY: the heap is alive and the three places are valid.
        let fixed = unsafe {
            ffi::zf_heap_room(self.inner.raw.as_ptr(), &mut room.size, &mut room.free, &mut room.largest_free)
        };
        fixed.then_some(room)
    }

    /// The last allocation that found no place, if there was one since the heap was made.
    ///
    /// # Errors
    ///
    /// If there is no memory for its message.
    pub fn last_refusal(&self) -> Result<Option<Refusal>> {
        let (mut raw, mut text) = (ffi::RawRefusal::default(), ptr::null_mut());
        // SAFETY: the heap is alive and both places are valid.
        let message = unsafe { ffi::zf_heap_refusal(self.inner.raw.as_ptr(), &mut raw, &mut text) };
        ffi::check("Heap::last_refusal", message)?;
        // SAFETY: a phase is a text of `phase`, which lives for ever.
        Ok((!text.is_null()).then(|| unsafe { Refusal::new(&raw, self.limit().unwrap_or(0), ffi::take_text(text)) }))
    }

    /// Makes this the calling thread's heap until the guard is dropped. Guards nest.
    #[must_use = "the heap is left again when the guard is dropped"]
    pub fn enter(&self) -> HeapGuard {
        HeapGuard { before: set_current(Some(self.clone())), _thread: PhantomData }
    }

    /// The heap that the calling thread entered.
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
        stats.room = self.room();
        stats
    }

    /// Starts a new peak from what is live now.
    pub fn reset_peak(&self) {
        // SAFETY: the heap is alive.
        unsafe { ffi::zf_heap_reset_peak(self.inner.raw.as_ptr()) }
    }

    /// Gives the memory of cached and free blocks back to the system.
    pub fn release_cached(&self) {
        // SAFETY: the heap is alive.
        unsafe { ffi::zf_heap_drop_cached(self.inner.raw.as_ptr()) }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Heap").field("name", &self.inner.name).field("stats", &self.stats()).finish()
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

/// Names what the calling thread is doing until the guard is dropped, for [`Refusal::phase`]. Guards nest.
#[must_use = "the former phase returns when the guard is dropped"]
pub fn phase(name: &'static str) -> PhaseGuard {
    PhaseGuard { before: set_phase((name.as_ptr().cast(), name.len())), _thread: PhantomData }
}

/// A text of [`phase`], or a null pointer.
type RawPhase = (*const c_char, usize);

fn set_phase((text, length): RawPhase) -> RawPhase {
    let mut before = (ptr::null(), 0);
    // SAFETY: the text is null or comes from a `&'static str`, and the places are valid.
    unsafe { ffi::zf_heap_phase(text, length, &mut before.0, &mut before.1) };
    before
}

/// Restores the thread's former phase when dropped.
#[derive(Debug)]
pub struct PhaseGuard {
    before: RawPhase,
    /// The phase belongs to the thread; a raw pointer already keeps the guard there.
    _thread: PhantomData<*const ()>,
}

impl Drop for PhaseGuard {
    fn drop(&mut self) {
        set_phase(self.before);
    }
}
