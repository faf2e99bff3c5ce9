//! What a worker did so far, and why it ended, for those who look at it from outside.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use zf_core::Error;
use zf_core::stage::{HostWork, TierBytes};

#[derive(Debug, Default)]
pub(super) struct Progress {
    nanos: AtomicU64,
    elements: AtomicU64,
    bytes: Mutex<TierBytes>,
    failed: Mutex<Option<String>>,
}

impl Progress {
    /// Books work that began at `started`.
    pub(super) fn worked(&self, started: Instant, elements: u64) {
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.elements.fetch_add(elements, Ordering::Relaxed);
    }

    pub(super) fn holds(&self, bytes: TierBytes) {
        *self.bytes.lock() = bytes;
    }

    pub(super) fn work(&self) -> HostWork {
        HostWork {
            seconds: self.nanos.load(Ordering::Relaxed) as f64 / 1e9,
            elements: self.elements.load(Ordering::Relaxed),
            bytes: *self.bytes.lock(),
        }
    }

    /// The first reason stays.
    pub(super) fn fail(&self, reason: String) {
        self.failed.lock().get_or_insert(reason);
    }

    /// Whether it ended with a reason.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.lock().is_some()
    }

    /// Why the worker ended.
    pub(super) fn reason(&self, name: &str) -> Error {
        let reason = self.failed.lock().clone();
        Error::Engine(format!("{name}: {}", reason.as_deref().unwrap_or("it ended")))
    }
}
