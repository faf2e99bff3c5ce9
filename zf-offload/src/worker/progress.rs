//! What a worker did so far, and why it ended, for those who look at it from outside.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use zf_core::Error;
use zf_core::stage::{HostWork, TierBytes};

#[derive(Debug, Default)]
pub(super) struct Progress {
    updating: AtomicU64,
    adding: AtomicU64,
    elements: AtomicU64,
    absolute: Mutex<f64>,
    bytes: Mutex<TierBytes>,
    failed: Mutex<Option<String>>,
}

impl Progress {
    /// Books adding that began at `started`.
    pub(super) fn added(&self, started: Instant) {
        self.adding.fetch_add(nanos(started), Ordering::Relaxed);
    }

    /// Books an update of so many elements that began at `started`; `absolute` is the sum of their absolute gradients.
    pub(super) fn updated(&self, started: Instant, elements: u64, absolute: f64) {
        self.updating.fetch_add(nanos(started), Ordering::Relaxed);
        self.elements.fetch_add(elements, Ordering::Relaxed);
        *self.absolute.lock() += absolute;
    }

    pub(super) fn holds(&self, bytes: TierBytes) {
        *self.bytes.lock() = bytes;
    }

    pub(super) fn work(&self) -> HostWork {
        HostWork {
            updating: self.updating.load(Ordering::Relaxed) as f64 / 1e9,
            adding: self.adding.load(Ordering::Relaxed) as f64 / 1e9,
            absolute: *self.absolute.lock(),
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

fn nanos(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
