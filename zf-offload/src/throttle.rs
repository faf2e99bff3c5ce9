//! Work slowed down to a number of bytes a second, so that one machine can have the proportions of another.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::precise;

/// How late a wait may have ended and still be made up for. More than that is a pause of the machine.
const LATEST: Duration = Duration::from_millis(5);

/// The longest that one piece of work is stretched to.
const LONGEST: Duration = Duration::from_secs(3600);

/// Keeps the rate at which all users of it together spend bytes at or below a given one.
///
/// Time in which nothing was spent gives no credit. That a wait ended late does, up to 5 ms, so that the rate is met in the
/// long run and not merely kept below.
///
/// ```
/// use zf_offload::throttle::Throttle;
///
/// let throttle = Throttle::new(Some(1e9));
/// let sum: i32 = throttle.spend(1_000_000, || (1..10).sum());
/// assert_eq!(sum, 45);
/// ```
#[derive(Debug)]
pub struct Throttle {
    rate: Option<f64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When all that was spent is paid for.
    until: Option<Instant>,
    /// How late the last wait ended.
    late: Duration,
}

impl Throttle {
    /// At most so many bytes a second; without a number, or with one that is not above 0, as many as there are.
    pub fn new(bytes_per_second: Option<f64>) -> Self {
        Self { rate: bytes_per_second.filter(|rate| *rate > 0.0), state: Mutex::default() }
    }

    /// The rate in bytes a second, if there is one.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// Runs `work`, which reads and writes `bytes` bytes, and returns no earlier than these are paid for. Threads that
    /// share a throttle share its rate.
    pub fn spend<T>(&self, bytes: u64, work: impl FnOnce() -> T) -> T {
        let Some(rate) = self.rate else { return work() };
        let until = self.state.lock().charge(bytes, rate, Instant::now());
        let result = work();
        if Instant::now() < until {
            precise::wait_until(until, || false);
            self.state.lock().late = until.elapsed().min(LATEST);
        }
        result
    }
}

impl State {
    /// The moment at which `bytes`, spent from `now` on, are paid for.
    fn charge(&mut self, bytes: u64, rate: f64, now: Instant) -> Instant {
        let cost = Duration::try_from_secs_f64(bytes as f64 / rate).map_or(LONGEST, |cost| cost.min(LONGEST));
        let from = now.checked_sub(std::mem::take(&mut self.late)).unwrap_or(now);
        let until = self.until.map_or(from, |until| until.max(from)) + cost;
        self.until = Some(until);
        until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_rate_is_met_and_idle_time_gives_no_credit() {
        let (mut state, zero) = (State::default(), Instant::now());
        // 1000 bytes a second: a byte takes 1 ms.
        assert_eq!(state.charge(10, 1e3, zero), zero + 10 * MS);
        // The wait ended 2 ms late, which the next one makes up for.
        state.late = 2 * MS;
        assert_eq!(state.charge(10, 1e3, zero + 12 * MS), zero + 20 * MS);
        // Nothing was spent for 80 ms.
        assert_eq!(state.charge(10, 1e3, zero + 100 * MS), zero + 110 * MS);
        // Work that took longer than its bytes leaves nothing behind either.
        assert_eq!(state.charge(10, 1e3, zero + 150 * MS), zero + 160 * MS);
    }

    #[test]
    fn threads_share_the_rate() {
        let (mut state, zero) = (State::default(), Instant::now());
        let ends: Vec<_> = (0..4).map(|_| state.charge(5, 1e3, zero)).collect();
        assert_eq!(ends, [5, 10, 15, 20].map(|ms| zero + ms * MS));
    }

    #[test]
    fn spending_takes_its_time() {
        let throttle = Throttle::new(Some(1e6));
        let start = Instant::now();
        for i in 0..5 {
            assert_eq!(throttle.spend(2_000, || i), i);
        }
        // A lower bound holds on any machine.
        assert!(start.elapsed() >= 10 * MS);
    }

    #[test]
    fn without_a_rate_nothing_waits() {
        for throttle in [Throttle::new(None), Throttle::new(Some(0.0)), Throttle::new(Some(f64::NAN))] {
            assert_eq!(throttle.rate(), None);
            assert_eq!(throttle.spend(u64::MAX, || 7), 7);
        }
    }
}
