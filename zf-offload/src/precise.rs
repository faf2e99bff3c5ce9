//! Waiting for a moment, to a few microseconds.

use std::num::NonZeroU64;
use std::thread;
use std::time::{Duration, Instant};

/// The last part of a wait is spent yielding: a sleep ends late by about as much.
const YIELDING: Duration = Duration::from_micros(50);

/// The longest sleep at once, so that a thread that is told to end does so soon.
const SLICE: Duration = Duration::from_millis(20);

/// Asks the system to end the calling thread's sleeps at once instead of up to 50 µs late.
pub(crate) fn sharpen() {
    // Without it waits still end, only less exactly.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
}

/// Waits until `deadline`; `false` if `stop` said yes before.
pub(crate) fn wait_until(deadline: Instant, stop: impl Fn() -> bool) -> bool {
    loop {
        if stop() {
            return false;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        match left.checked_sub(YIELDING) {
            Some(sleep) if !sleep.is_zero() => thread::sleep(sleep.min(SLICE)),
            _ => thread::yield_now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_after_its_moment_or_when_told() {
        let deadline = Instant::now() + Duration::from_millis(2);
        assert!(wait_until(deadline, || false));
        assert!(Instant::now() >= deadline);
        assert!(wait_until(deadline, || false), "a moment in the past");
        assert!(!wait_until(Instant::now() + Duration::from_secs(3600), || true));
    }
}
