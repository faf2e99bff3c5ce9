//! What happened when: spans and counters of each rank, for Perfetto or `chrome://tracing`.
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
//! {
//!     let _forward = trace.span(Lane::Compute, "forward");
//!     let _gather = trace.wait("gather", "parameters of model.layers.1");
//!     trace.counter("live bytes", 4096.0);
//! }
//! assert!(trace.totals().seconds(Lane::Wait) <= trace.totals().seconds(Lane::Compute));
//! write_traces(&folder.path().join("trace.json"), &[trace])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::json;

use crate::files::AtomicFile;
use crate::{Error, Result};

/// Events kept of each rank unless told otherwise: about 20 MB.
pub const DEFAULT_EVENTS: usize = 200_000;

/// What kind of time a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The device computes.
    Compute,
    /// This rank moves bytes to other ranks, or a collective is in flight.
    Comm,
    /// The device has nothing to do: it waits for the host, a link or other ranks.
    Wait,
    /// Host workers compute.
    Host,
    /// Checkpoints are made or written.
    Checkpoint,
}

impl Lane {
    /// All lanes, in the order in which they are shown.
    pub const ALL: [Self; 5] = [Self::Compute, Self::Comm, Self::Wait, Self::Host, Self::Checkpoint];

    /// The name in the trace.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Comm => "comm",
            Self::Wait => "wait",
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

/// Writes the traces of this process's ranks as one Chrome trace (JSON): a process for each rank, a track for each lane,
/// further tracks where spans of a lane overlap without nesting.
///
/// # Errors
/// [`Error::Io`] naming the file.
pub fn write_traces(path: &Path, traces: &[Trace]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    write_json(&mut file, traces).map_err(|e| Error::io(path, e))?;
    file.commit()
}

fn write_json(out: &mut dyn Write, traces: &[Trace]) -> io::Result<()> {
    let (start, wall) = epoch();
    let micros = |at: Instant| at.saturating_duration_since(*start).as_nanos() as f64 / 1e3;
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut dropped = 0;
    let mut comma = "\n";
    for trace in traces {
        let mut events: Vec<Event> = {
            let events = trace.0.events.lock();
            dropped += events.dropped;
            events.kept.iter().cloned().collect()
        };
        // Spans are recorded as they end; an outer one comes before those it holds.
        events.sort_by_key(|event| (event.start, std::cmp::Reverse(end(event))));
        let pid = trace.rank();
        let mut emit = |value: serde_json::Value| -> io::Result<()> {
            write!(out, "{comma}{value}")?;
            comma = ",\n";
            Ok(())
        };
        emit(json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": format!("rank {pid}")}}))?;
        let mut tracks = Tracks::default();
        for event in &events {
            match &event.what {
                What::Span { lane, nanos, reason } => {
                    let (track, new) = tracks.place(*lane, event.start, end(event));
                    let tid = *lane as usize * 100 + track;
                    if new {
                        let name = match track {
                            0 => lane.name().to_owned(),
                            _ => format!("{} {}", lane.name(), track + 1),
                        };
                        emit(
                            json!({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}),
                        )?;
                        emit(
                            json!({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}),
                        )?;
                    }
                    let mut value = json!({
                        "ph": "X", "pid": pid, "tid": tid, "name": event.name, "cat": lane.name(),
                        "ts": micros(event.start), "dur": *nanos as f64 / 1e3,
                    });
                    if let Some(reason) = reason {
                        value["args"] = json!({"reason": reason});
                    }
                    emit(value)?;
                }
                What::Counter(count) => emit(json!({
                    "ph": "C", "pid": pid, "name": event.name, "ts": micros(event.start),
                    "args": {"value": count},
                }))?,
            }
        }
    }
    let other = json!({"dropped_events": dropped, "epoch_unix_seconds": wall});
    write!(out, "\n],\"otherData\":{other}}}\n")
}

/// Tracks of each lane, with the ends of the spans that are open on each.
#[derive(Default)]
struct Tracks([Vec<Vec<Instant>>; Lane::ALL.len()]);

impl Tracks {
    /// The first track of `lane` on which a span, coming in the order of starts, nests or follows; and whether the track
    /// is new.
    fn place(&mut self, lane: Lane, start: Instant, end: Instant) -> (usize, bool) {
        let tracks = &mut self.0[lane as usize];
        for (number, open) in tracks.iter_mut().enumerate() {
            while open.last().is_some_and(|&last| last <= start) {
                open.pop();
            }
            if open.last().is_none_or(|&last| end <= last) {
                open.push(end);
                return (number, false);
            }
        }
        tracks.push(vec![end]);
        (tracks.len() - 1, true)
    }
}

fn end(event: &Event) -> Instant {
    match event.what {
        What::Span { nanos, .. } => event.start + Duration::from_nanos(nanos),
        What::Counter(_) => event.start,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn written(traces: &[Trace]) -> serde_json::Value {
        let mut out = Vec::new();
        write_json(&mut out, traces).unwrap();
        serde_json::from_slice(&out).unwrap()
    }

    fn spans(value: &serde_json::Value) -> Vec<serde_json::Value> {
        let events = value["traceEvents"].as_array().unwrap();
        events.iter().filter(|e| e["ph"] == "X").cloned().collect()
    }

    #[test]
    fn spans_nest_on_one_track_and_overlaps_get_their_own() {
        let trace = Trace::new(3, 100);
        let t = |ms: u64| epoch().0 + Duration::from_millis(ms);
        trace.record(Lane::Comm, "inner", None, t(1), t(2));
        trace.record(Lane::Comm, "outer", None, t(0), t(3));
        trace.record(Lane::Comm, "crossing", Some("peer".into()), t(2), t(5));
        trace.record(Lane::Comm, "after", None, t(3), t(4));
        trace.counter("live", 7.0);
        let value = written(&[trace]);
        let found: Vec<(String, u64)> =
            spans(&value).iter().map(|e| (e["name"].as_str().unwrap().into(), e["tid"].as_u64().unwrap())).collect();
        let expected = [("outer", 100), ("inner", 100), ("crossing", 101), ("after", 100)];
        assert_eq!(found, expected.map(|(n, t)| (n.to_owned(), t)));
        assert_eq!(spans(&value)[2]["args"]["reason"], "peer");
        assert_eq!(spans(&value)[1]["ts"], 1000.0);
        assert_eq!(spans(&value)[1]["dur"], 1000.0);
        assert!(
            value["traceEvents"]
                .as_array()
                .unwrap()
                .iter()
                .any(|e| e["ph"] == "C" && e["args"]["value"] == 7.0 && e["pid"] == 3)
        );
    }

    #[test]
    fn memory_is_bounded_and_totals_are_not() {
        let trace = Trace::new(0, 4);
        let t = |ms: u64| epoch().0 + Duration::from_millis(ms);
        for i in 0..10u64 {
            trace.record(Lane::Host, format!("update {i}"), None, t(i), t(i + 1));
        }
        let before = trace.totals();
        assert_eq!(before.seconds(Lane::Host), 0.01);
        trace.record(Lane::Wait, "x", None, t(0), t(2));
        assert_eq!(trace.totals().since(&before).seconds(Lane::Wait), 0.002);
        assert_eq!(trace.totals().since(&before).seconds(Lane::Host), 0.0);
        let value = written(&[trace]);
        assert_eq!(spans(&value).len(), 4);
        assert_eq!(value["otherData"]["dropped_events"], 7);
    }

    #[test]
    fn threads_record_at_once() {
        let trace = Trace::new(0, 10_000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _span = trace.wait("gather", "unit \"a\"\n");
                    }
                });
            }
        });
        assert_eq!(spans(&written(&[trace])).len(), 400);
    }
}
