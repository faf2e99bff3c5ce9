//! Runs the ranks of this process, each on a thread of its own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use zf_sys::heap::Heap;

use crate::bytes::ByteSize;
use crate::stage::{Fabric, Transport};
use crate::{Error, Result};

/// What a rank's thread is given.
pub struct Rank {
    /// The rank.
    pub rank: usize,
    /// Number of ranks of the run.
    pub world: usize,
    /// Its connection to the others.
    pub transport: Box<dyn Transport>,
    /// The heap in which all its tensors are booked; already entered.
    pub heap: Heap,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}

/// Runs `body` once for each local rank of `fabric` and returns the results by rank. A rank's thread first sets its
/// number of operator threads (libtorch keeps it per thread) and enters its heap.
///
/// # Errors
/// The first cause where a rank fails or panics: a rank that only lost its peers comes after the one that failed.
pub fn run_ranks<T: Send>(
    fabric: &Arc<dyn Fabric>,
    operator_threads: usize,
    body: impl Fn(Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_ranks_on(fabric, operator_threads, None, body)
}

/// The same, with all tensors of a rank on a device of `memory` bytes where that is given.
///
/// # Errors
/// As [`run_ranks`]; memory that the system cannot reserve.
pub fn run_ranks_on<T: Send>(
    fabric: &Arc<dyn Fabric>,
    operator_threads: usize,
    memory: Option<ByteSize>,
    body: impl Fn(Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let ranks = fabric.local_ranks();
    let world = fabric.world();
    let heap_of = |rank: &usize| {
        let name = format!("rank {rank}");
        match memory {
            Some(size) => Heap::with_limit(name, usize::try_from(size.0).unwrap_or(usize::MAX)),
            None => Heap::new(name),
        }
    };
    // Before any rank starts, so that none waits for one that has no memory.
    let heaps = ranks.iter().map(heap_of).collect::<zf_sys::Result<Vec<_>>>()?;
    let start = |rank: usize, heap: Heap| -> Result<T> {
        zf_sys::threads::set_operator_threads(operator_threads)?;
        let _inside = heap.enter();
        let transport = fabric.connect(rank)?;
        body(Rank { rank, world, transport, heap: heap.clone() })
    };
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = &start;
        let threads: Vec<_> = ranks
            .iter()
            .zip(heaps)
            .map(|(&rank, heap)| {
                let guarded = move || {
                    catch_unwind(AssertUnwindSafe(|| start(rank, heap)))
                        .unwrap_or_else(|panic| Err(Error::Engine(format!("rank {rank} panicked: {}", text(&*panic)))))
                };
                std::thread::Builder::new().name(format!("rank-{rank}")).spawn_scoped(scope, guarded)
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| Err(Error::Engine(text(&*panic)))),
                Err(error) => Err(Error::Engine(format!("cannot start the thread of a rank: {error}"))),
            })
            .collect()
    });
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(value) => values.push(value),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(Error::is_consequence);
    errors.into_iter().next().map_or(Ok(values), Err)
}

impl Error {
    /// Whether this error is what a rank sees when another rank failed.
    fn is_consequence(&self) -> bool {
        match self {
            Self::Comm(_) => true,
            Self::At { source, .. } => source.is_consequence(),
            _ => false,
        }
    }
}

/// The message of a panic.
pub(crate) fn text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
