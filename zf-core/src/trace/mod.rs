//! What happened when: spans, counters and the beginnings of steps of each rank, for Perfetto or `chrome://tracing`.
//!
//! A span has a [`Lane`] (what kind of time it is), a name and, where it is a wait, a reason, so that every stall has a
//! name. Recording takes a lock that nobody else holds for long and two readings of the clock; memory is bounded by
//! keeping only the newest events, while the totals of the lanes count everything.
//!
//! ```
//! use zf_core::trace::{Lane, Trace, write_traces};
//!
//! let folder = tempfile::tempdir()?;
//! let trace = Trace::new(0, 1000);
//! trace.step(0);
//! {
//!     let _forward = trace.span(Lane::Compute, "forward");
//!     let _gather = trace.wait("gather", "parameters of model.layers.1");
//!     trace.counter("live bytes", 4096.0);
//! }
//! assert!(trace.totals().seconds(Lane::Wait) <= trace.totals().seconds(Lane::Compute));
//! write_traces(&folder.path().join("trace.json"), &[trace])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod chrome;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

pub use self::chrome::write_traces;

/// Events kept of each rank unless told otherwise: about 20 MB.
pub const DEFAULT_EVENTS: usize = 200_000;

/// What kind of time a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The device computes.
    Compute,
    /// The device has nothing to do: it waits for the host, a link or other ranks.
    Wait,
    /// This rank moves bytes to other ranks, or a collective is in flight.
    Comm,
    /// The link carries bytes from the device to the host.
    ToHost,
    /// The link carries bytes from the host to the device.
    ToDevice,
    /// Host workers compute.
    Host,
    /// Checkpoints are made or written.
    Checkpoint,
}

impl Lane {
    /// All lanes, in the order in which they are shown.
    pub const ALL: [Self; 7] =
        [Self::Compute, Self::Wait, Self::Comm, Self::ToHost, Self::ToDevice, Self::Host, Self::Checkpoint];

    /// The name in the trace.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Wait => "wait",
            Self::Comm => "comm",
            Self::ToHost => "to host",
            Self::ToDevice => "to device",
            Self::Host => "host",
            Self::Checkpoint => "checkpoint",
        }
    }
}

/// Time spent in each lane since the trace began. Spans that overlap in one lane count each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals([u64; Lane::ALL.len()]);

impl Totals {
    /// Seconds spent in `lane`.
    pub fn seconds(&self, lane: Lane) -> f64 {
        Duration::from_nanos(self.0[lane as usize]).as_secs_f64()
    }

    /// What was added since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut now = *self;
        for (n, e) in now.0.iter_mut().zip(earlier.0) {
            *n = n.saturating_sub(e);
        }
        now
    }
}

/// The recorder of one rank. Clones share it; any thread may record.
#[derive(Debug, Clone)]
pub struct Trace(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    rank: usize,
    capacity: usize,
    totals: [AtomicU64; Lane::ALL.len()],
    events: Mutex<Events>,
}

#[derive(Debug, Default)]
struct Events {
    kept: VecDeque<Event>,
    dropped: u64,
}

#[derive(Debug, Clone)]
struct Event {
    name: Cow<'static, str>,
    start: Instant,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Span { lane: Lane, nanos: u64, reason: Option<Cow<'static, str>> },
    Counter(f64),
    Step(u64),
}

impl Event {
    /// When it is over; at once for what is no span.
    fn end(&self) -> Instant {
        match self.what {
            What::Span { nanos, .. } => self.start + Duration::from_nanos(nanos),
            What::Counter(_) | What::Step(_) => self.start,
        }
    }
}

impl Trace {
    /// A recorder that keeps the newest `capacity` events; with 0 it only adds up the lanes.
    pub fn new(rank: usize, capacity: usize) -> Self {
        epoch();
        Self(Arc::new(Shared { rank, capacity, totals: Default::default(), events: Mutex::default() }))
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Begins a span, which ends when the guard is dropped.
    pub fn span(&self, lane: Lane, name: impl Into<Cow<'static, str>>) -> Span<'_> {
        let name = name.into();
        let phase = match (&name, lane) {
            (Cow::Borrowed(name), Lane::Compute | Lane::Checkpoint) => Some(zf_sys::heap::phase(name)),
            _ => None,
        };
        Span { trace: self, lane, name, reason: None, start: Instant::now(), _phase: phase }
    }

    /// Begins a span of the lane [`Lane::Wait`] with its reason: what is waited for.
    pub fn wait(&self, name: impl Into<Cow<'static, str>>, reason: impl Into<Cow<'static, str>>) -> Span<'_> {
        let mut span = self.span(Lane::Wait, name);
        span.reason = Some(reason.into());
        span
    }

    /// Records a span that is over, or that no guard can follow (a collective in flight).
    pub fn record(
        &self,
        lane: Lane,
        name: impl Into<Cow<'static, str>>,
        reason: Option<Cow<'static, str>>,
        start: Instant,
        end: Instant,
    ) {
        let nanos = end.saturating_duration_since(start).as_nanos();
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        self.0.totals[lane as usize].fetch_add(nanos, Ordering::Relaxed);
        let what = What::Span { lane, nanos, reason };
        self.push(name.into(), start, what);
    }

    /// Records the value of a counter now.
    pub fn counter(&self, name: impl Into<Cow<'static, str>>, value: f64) {
        self.push(name.into(), Instant::now(), What::Counter(value));
    }

    /// Marks that step `number` (from 0) begins now; it lasts until the next mark. What lies between the end of its own
    /// work and that mark (validation, a checkpoint) belongs to it.
    pub fn step(&self, number: u64) {
        self.push(Cow::Borrowed("step"), Instant::now(), What::Step(number));
    }

    /// Time spent in each lane so far, without spans that are still open.
    pub fn totals(&self) -> Totals {
        Totals(std::array::from_fn(|i| self.0.totals[i].load(Ordering::Relaxed)))
    }

    fn push(&self, name: Cow<'static, str>, start: Instant, what: What) {
        if self.0.capacity == 0 {
            return;
        }
        let mut events = self.0.events.lock();
        if events.kept.len() == self.0.capacity {
            events.kept.pop_front();
            events.dropped += 1;
        }
        events.kept.push_back(Event { name, start, what });
    }
}

/// An open span.
#[must_use = "a span ends when its guard is dropped"]
#[derive(Debug)]
pub struct Span<'a> {
    trace: &'a Trace,
    lane: Lane,
    name: Cow<'static, str>,
    reason: Option<Cow<'static, str>>,
    start: Instant,
    /// An allocation that fails meanwhile knows what the rank was doing.
    _phase: Option<zf_sys::heap::PhaseGuard>,
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        let name = std::mem::take(&mut self.name);
        self.trace.record(self.lane, name, self.reason.take(), self.start, Instant::now());
    }
}

/// Where times of this process begin, and the seconds since 1970 then, by which traces of several processes can be
/// aligned.
fn epoch() -> &'static (Instant, f64) {
    static EPOCH: OnceLock<(Instant, f64)> = OnceLock::new();
    EPOCH.get_or_init(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), wall.as_secs_f64())
    })
}
