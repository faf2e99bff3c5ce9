//! A trace in Chrome's JSON format, which Perfetto and `chrome://tracing` read.

use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use serde_json::json;

use super::{Event, Lane, Trace, What, epoch};
use crate::files::AtomicFile;
use crate::{Error, Result};

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
        events.sort_by_key(|event| (event.start, std::cmp::Reverse(event.end())));
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
                    let (track, new) = tracks.place(*lane, event.start, event.end());
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
                What::Step(number) => emit(json!({
                    "ph": "i", "pid": pid, "tid": 0, "name": format!("step {number}"), "cat": "step", "s": "p",
                    "ts": micros(event.start), "args": {"step": number},
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        let expected = [("outer", 200), ("inner", 200), ("crossing", 201), ("after", 200)];
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

    #[test]
    fn lanes_stand_in_the_order_in_which_they_are_shown() {
        let names = ["compute", "wait", "comm", "to host", "to device", "host", "checkpoint"];
        assert_eq!(Lane::ALL.map(Lane::name), names);
        for (place, lane) in Lane::ALL.into_iter().enumerate() {
            assert_eq!(lane as usize, place, "{lane:?}: totals and tracks are indexed by the lane");
        }
    }

    #[test]
    fn steps_are_marks_of_the_whole_rank() {
        let trace = Trace::new(2, 100);
        trace.step(41);
        trace.step(42);
        let value = written(&[trace]);
        let marks: Vec<_> = value["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "i").collect();
        assert_eq!(marks.len(), 2);
        assert_eq!(marks[0]["args"]["step"], 41);
        assert_eq!(marks[1]["name"], "step 42");
        assert_eq!(marks[1]["s"], "p");
        assert_eq!(marks[1]["pid"], 2);
        assert!(marks[0]["ts"].as_f64() <= marks[1]["ts"].as_f64());
    }
}
