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
    first_cause(errors).map_or(Ok(values), Err)
}

/// The error that the others follow from. A rank that fails tells the others in its own words, and these reach a rank's
/// error also through libtorch, which knows only texts: an error that quotes another one is its consequence.
fn first_cause(errors: Vec<Error>) -> Option<Error> {
    let words: Vec<(String, String)> = errors.iter().map(|error| (error.to_string(), error.words())).collect();
    let quotes = |index: usize| {
        let others = words.iter().enumerate().filter(|(other, _)| *other != index);
        // A rank that left without a word is known by its number.
        let left = |(text, _): &(String, String)| {
            let number = text.strip_suffix(" left").and_then(|text| text.rsplit_once("rank ")).map(|(_, rank)| rank);
            number.is_some_and(|rank| rank.parse::<usize>().is_ok())
        };
        left(&words[index]) || others.map(|(_, (_, own))| own).any(|own| words[index].0.contains(own))
    };
    let place = |(index, error): &(usize, Error)| (error.is_consequence(), quotes(*index));
    errors.into_iter().enumerate().min_by_key(place).map(|(_, error)| error)
}

impl Error {
    /// Whether this error is what a rank sees when another rank failed.
    fn is_consequence(&self) -> bool {
        match self {
            Self::Comm(_) => true,
            Self::At { source, .. } => source.is_consequence(),
            // A model hands on what the engine told it.
            Self::Plugin(error) => error.chain().any(|cause| cause.downcast_ref().is_some_and(Self::is_consequence)),
            _ => false,
        }
    }

    /// What the rank told the others.
    fn words(&self) -> String {
        match self {
            Self::At { source, .. } => source.words(),
            Self::OutOfMemory(full) => full.refusal.message.clone(),
            error => error.to_string(),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rank: usize, error: Error) -> Error {
        Error::At { rank, step: 3, source: Box::new(error) }
    }

    #[track_caller]
    fn first(errors: Vec<Error>, rank: usize) {
        let found = first_cause(errors).expect("there are errors");
        assert!(found.to_string().starts_with(&format!("rank {rank}, ")), "{found}");
    }

    #[test]
    fn a_lost_peer_comes_after_its_cause_also_out_of_a_model_or_a_hook() {
        let cause = || at(2, Error::Engine("the model ran unit `a` twice".into()));
        first(vec![at(0, Error::comm("rank 2 left")), cause()], 2);
        let lost = anyhow::Error::new(Error::comm("rank 2 left")).context("unit `b`");
        first(vec![at(0, Error::Plugin(lost)), cause()], 2);
        let message = "rank 2 failed: the model ran unit `a` twice".to_owned();
        let hook = zf_sys::Error::Libtorch { call: "autograd::backward", message };
        first(vec![at(0, Error::Sys(hook)), cause()], 2);
        // Where all fail alike, the first speaks for them.
        first(vec![at(0, Error::Engine("the same".into())), at(1, Error::Engine("the same".into()))], 0);
    }
}
