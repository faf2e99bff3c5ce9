//! The clock of one direction of an emulated link.

use std::time::{Duration, Instant};

use zf_core::bandwidth::Bandwidth;

/// When transfers start and end at a given speed.
///
/// A transfer starts when it is issued or when the one before it ends, by this clock: a thread that was scheduled late does
/// not shift what follows, so that transfers back to back keep the rate exactly.
#[derive(Debug)]
pub(super) struct Pace {
    bandwidth: Bandwidth,
    latency: Duration,
    /// When the last transfer ended by the clock.
    end: Option<Instant>,
    /// When the last transfer ended in truth.
    left: Option<Instant>,
}

impl Pace {
    pub(super) fn new(bandwidth: Bandwidth, latency: Duration) -> Self {
        Self { bandwidth, latency, end: None, left: None }
    }

    /// When a transfer that was issued at `issued` ends.
    pub(super) fn next(&mut self, issued: Instant, bytes: u64) -> Instant {
        let start = self.end.map_or(issued, |end| end.max(issued));
        let end = start + self.latency + self.bandwidth.time(bytes);
        self.end = Some(end);
        end
    }

    /// From when on the direction was taken by the transfer issued at `issued` that ended just `now`. Such times neither
    /// overlap nor leave out any in which a transfer was on its way.
    pub(super) fn taken_since(&mut self, issued: Instant, now: Instant) -> Instant {
        let since = self.left.map_or(issued, |left| left.max(issued)).min(now);
        self.left = Some(now);
        since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_back_to_back_keep_the_rate_and_idle_time_gives_none() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new("1MB/s".parse().unwrap(), ms(1));
        let zero = Instant::now();
        assert_eq!(pace.next(zero, 9_000), zero + ms(10));
        // Queued while the first was on its way.
        assert_eq!(pace.next(zero + ms(1), 9_000), zero + ms(20));
        assert_eq!(pace.next(zero + ms(19), 0), zero + ms(21));
        // The link was idle for 79 ms.
        assert_eq!(pace.next(zero + ms(100), 1_000), zero + ms(102));
    }

    #[test]
    fn time_taken_is_counted_once() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new("1MB/s".parse().unwrap(), ms(0));
        let zero = Instant::now();
        assert_eq!(pace.taken_since(zero, zero + ms(10)), zero);
        assert_eq!(pace.taken_since(zero + ms(5), zero + ms(20)), zero + ms(10));
        assert_eq!(pace.taken_since(zero + ms(30), zero + ms(40)), zero + ms(30));
    }
}
