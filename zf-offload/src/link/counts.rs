//! What a link has carried.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zf_core::stage::{Traffic, Way};

/// Counters that any thread may advance.
#[derive(Debug, Default)]
pub(super) struct Counts {
    to_host: AtomicU64,
    to_device: AtomicU64,
    moves: AtomicU64,
    busy_to_host: AtomicU64,
    busy_to_device: AtomicU64,
}

impl Counts {
    /// Adds a finished transfer, which kept its direction busy for `busy`.
    pub(super) fn add(&self, way: Way, moves: bool, bytes: u64, busy: Duration) {
        let (carried, time) = match way {
            Way::ToHost => (&self.to_host, &self.busy_to_host),
            Way::ToDevice => (&self.to_device, &self.busy_to_device),
        };
        let carried = if moves { &self.moves } else { carried };
        carried.fetch_add(bytes, Ordering::Relaxed);
        time.fetch_add(u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn traffic(&self) -> Traffic {
        let bytes = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |counter: &AtomicU64| Duration::from_nanos(bytes(counter)).as_secs_f64();
        Traffic {
            to_host: bytes(&self.to_host),
            to_device: bytes(&self.to_device),
            moves: bytes(&self.moves),
            busy_to_host: seconds(&self.busy_to_host),
            busy_to_device: seconds(&self.busy_to_device),
        }
    }
}
