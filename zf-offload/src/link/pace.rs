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
    /// Until when the last transfer held the direction in truth.
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

    /// From when until when the direction was held by the transfer issued at `issued`, which was to end at `end` and whose
    /// bytes took `copying` to copy. A copy slower than the link holds it for longer; that a thread is woken late does not.
    /// Times of different transfers do not overlap.
    pub(super) fn held(&mut self, issued: Instant, end: Instant, copying: Duration) -> (Instant, Instant) {
        let since = self.left.map_or(issued, |left| left.max(issued));
        let left = end.max(since + copying);
        self.left = Some(left);
        (since, left)
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
    fn a_direction_is_held_by_one_transfer_at_a_time() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new("1MB/s".parse().unwrap(), ms(0));
        let zero = Instant::now();
        assert_eq!(pace.held(zero, zero + ms(10), ms(2)), (zero, zero + ms(10)));
        // A slow copy.
        assert_eq!(pace.held(zero + ms(5), zero + ms(20), ms(13)), (zero + ms(10), zero + ms(23)));
        // The clock catches up as far as copies allow.
        assert_eq!(pace.held(zero + ms(5), zero + ms(22), ms(1)), (zero + ms(23), zero + ms(24)));
        assert_eq!(pace.held(zero + ms(30), zero + ms(40), ms(1)), (zero + ms(30), zero + ms(40)));
    }
}
