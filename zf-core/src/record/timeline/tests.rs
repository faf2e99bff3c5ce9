//! Reading, choosing, rows and the picture.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::rows::{flatten, merge, without};
use super::*;
use crate::trace::{Trace, write_traces};

/// A run of `steps` steps of `step` seconds each: forward, a wait of `wait` seconds, a short collective.
fn run(root: &Path, name: &str, steps: u64, step: f64, wait: f64) -> PathBuf {
    let mut events = Vec::new();
    for number in 0..steps {
        let start = number as f64 * step;
        events.push(mark(start, number));
        events.push(span("compute", "forward", None, start, start + step));
        events.push(span("wait", "gather", Some("parameters of <model> & \"head\""), start, start + wait));
        events.push(span("comm", "reduce", None, start + step * 0.5, start + step * 0.75));
    }
    write(root, name, &events)
}

fn mark(start: f64, number: u64) -> Value {
    json!({"ph": "i", "pid": 0, "tid": 0, "name": format!("step {number}"), "cat": "step", "ts": start * 1e6, "s": "p", "args": {"step": number}})
}

fn span(lane: &str, name: &str, reason: Option<&str>, start: f64, end: f64) -> Value {
    let mut span = json!({"ph": "X", "pid": 0, "tid": 1, "name": name, "cat": lane, "ts": start * 1e6, "dur": (end - start) * 1e6});
    if let Some(reason) = reason {
        span["args"] = json!({"reason": reason});
    }
    span
}

fn write(root: &Path, name: &str, events: &[Value]) -> PathBuf {
    let folder = root.join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("trace.json"), json!({"traceEvents": events}).to_string()).unwrap();
    folder
}

fn numbers(timeline: &Timeline, range: &Range<usize>) -> Vec<u64> {
    timeline.steps()[range.clone()].iter().map(|step| step.number).collect()
}

/// Panics unless every tag is closed in its order, every attribute quoted and every `&` an entity.
fn assert_well_formed(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        let (text, tail) = rest.split_at(at);
        assert_entities(text);
        assert!(!text.contains('>'), "{text}");
        let (tag, tail) = tail[1..].split_once('>').unwrap();
        rest = tail;
        assert_entities(tag);
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
}

fn assert_entities(text: &str) {
    for part in text.split('&').skip(1) {
        assert!(["amp;", "lt;", "gt;", "quot;"].iter().any(|entity| part.starts_with(entity)), "{text}");
    }
}

/// The bars: start and width in pixels, and what the tooltip says.
fn bars(svg: &str) -> Vec<(f64, f64, String)> {
    let bar = |line: &str| {
        let attribute = |name: &str| {
            let (_, value) = line.split_once(&format!(" {name}=\"")).unwrap();
            value.split_once('"').unwrap().0.parse::<f64>().unwrap()
        };
        let (_, title) = line.split_once("<title>").unwrap();
        (attribute("x"), attribute("width"), title.split_once("</title>").unwrap().0.to_owned())
    };
    svg.lines().filter(|line| line.contains("<title>")).map(bar).collect()
}

#[test]
fn a_written_trace_is_read_back() {
    let root = tempfile::tempdir().unwrap();
    let (zero, three) = (Trace::new(0, 100), Trace::new(3, 100));
    for number in 7..9 {
        three.step(number);
        let start = Instant::now();
        three.record(Lane::Host, "update", None, start, start + Duration::from_millis(2));
        let _wait = three.wait("fence", "the link");
    }
    zero.step(0);
    write_traces(&root.path().join("trace.json"), &[zero, three]).unwrap();
    let timeline = Timeline::read(root.path(), 3).unwrap();
    assert_eq!(timeline.steps().iter().map(|step| step.number).collect::<Vec<_>>(), [7, 8]);
    assert_eq!(timeline.steps()[0].end, timeline.steps()[1].start);
    let lanes: Vec<Lane> = timeline.spans.iter().map(|span| span.lane).collect();
    assert_eq!(lanes.iter().filter(|&&lane| lane == Lane::Host).count(), 2);
    assert_eq!(lanes.iter().filter(|&&lane| lane == Lane::Wait).count(), 2);
    assert!(timeline.labels.contains(&Label { name: "fence".into(), reason: Some("the link".into()) }));
    let error = Timeline::read(root.path(), 1).unwrap_err().to_string();
    assert!(error.contains("expected events of rank 1, found those of these ranks: 0, 3"), "{error}");
}

#[test]
fn a_process_of_its_own_has_a_trace_of_its_own() {
    let root = tempfile::tempdir().unwrap();
    run(root.path(), "run", 2, 1.0, 0.5);
    let second = Trace::new(1, 10);
    second.step(5);
    write_traces(&root.path().join("run/trace.rank-1.json"), &[second]).unwrap();
    let folder = root.path().join("run");
    assert_eq!(Timeline::read(&folder, 0).unwrap().steps().len(), 2);
    assert_eq!(Timeline::read(&folder, 1).unwrap().steps()[0].number, 5);
}

#[test]
fn what_is_no_trace_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let error = |text: &str| {
        fs::write(root.path().join("trace.json"), text).unwrap();
        let error = Timeline::read(root.path(), 0).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let whole = json!({"traceEvents": [mark(0.0, 0), span("compute", "f", None, 0.0, 1.0)]}).to_string();
    for length in 0..whole.len() {
        let torn = error(&whole[..length]);
        assert!(torn.contains("trace.json: expected the trace of a run: "), "{torn}");
    }
    for (text, expected) in [
        ("[]", "an object with `traceEvents`"),
        ("{}", "no `traceEvents` in it"),
        (r#"{"traceEvents": []}"#, "expected events of rank 0, found those of these ranks: none"),
        (r#"{"traceEvents": [{"ph": "C"}]}"#, "expected marks where the steps of rank 0 begin"),
        (r#"{"traceEvents": [{"ph": "X", "ts": 1}]}"#, "expected `dur` in an event of the kind \"X\""),
        (
            r#"{"traceEvents": [{"ph": "X", "ts": 1, "dur": -1}]}"#,
            "expected `dur` from 0 to 1e15 microseconds, found -1e0",
        ),
        (r#"{"traceEvents": [{"ph": "X", "ts": 1e300, "dur": 1}]}"#, "expected `ts` from 0 to 1e15"),
        (r#"{"traceEvents": [{"ph": "i", "cat": "step", "ts": 1}]}"#, "expected `args.step`"),
        (r#"{"traceEvents": 3}"#, "a list of events"),
    ] {
        let found = error(text);
        assert!(found.contains(expected), "{text}: {found}");
    }
    let marks = json!({"traceEvents": [mark(0.0, 4), mark(1.0, 4)]}).to_string();
    assert!(error(&marks).contains("found step 4 after step 4"));
    fs::remove_file(root.path().join("trace.json")).unwrap();
    let missing = Timeline::read(root.path(), 0).unwrap_err();
    assert_eq!(missing.exit_code(), 2);
    assert!(missing.to_string().contains("trace.json: expected the trace of a run, which it writes at its end"));
}

#[test]
fn the_slowest_run_sets_the_scale_and_others_fill_it() {
    let root = tempfile::tempdir().unwrap();
    let slow = Timeline::read(&run(root.path(), "slow", 20, 3.0, 2.0), 0).unwrap();
    let fast = Timeline::read(&run(root.path(), "fast", 20, 1.0, 0.0), 0).unwrap();
    let tiny = Timeline::read(&run(root.path(), "tiny", 5, 1.0, 0.0), 0).unwrap();
    let runs = [slow, fast, tiny];
    let chosen = choose::choose(&runs, None).unwrap();
    assert_eq!(numbers(&runs[0], &chosen[0]), [8, 9, 10, 11]);
    assert_eq!(numbers(&runs[1], &chosen[1]), (8..20).collect::<Vec<_>>());
    assert_eq!(numbers(&runs[2], &chosen[2]), [0, 1, 2, 3, 4]);
    let chosen = choose::choose(&runs, Some(2..4)).unwrap();
    assert!(chosen.iter().all(|range| *range == (2..4)), "{chosen:?}");
    let error = choose::choose(&runs, Some(3..6)).unwrap_err().to_string();
    assert_eq!(error, "tiny: expected steps 3 to 5 in the trace, which holds steps 0 to 4");
    assert!(choose::choose(&runs, Some(Range { start: 4, end: 2 })).is_err());
    assert!(choose::choose(&runs, Some(0..u64::MAX)).is_err());
}

#[test]
fn checkpoints_and_validation_are_avoided() {
    let root = tempfile::tempdir().unwrap();
    let mut events: Vec<Value> = (0..20).map(|number| mark(number as f64, number)).collect();
    events.push(span("checkpoint", "checkpoint", None, 8.5, 8.9));
    events.push(span("compute", "validation", None, 12.1, 12.2));
    let timeline = Timeline::read(&write(root.path(), "run", &events), 0).unwrap();
    let chosen = choose::choose(std::slice::from_ref(&timeline), None).unwrap();
    // Between the two there are only three steps.
    assert_eq!(numbers(&timeline, &chosen[0]), [4, 5, 6, 7]);
}

#[test]
fn rows_show_the_innermost_span_once() {
    let span = |label, start, end| Span { lane: Lane::Host, label, start, end };
    let other = Span { lane: Lane::Comm, label: 9, start: 0.0, end: 9.0 };
    let spans =
        [other, span(0, 0.0, 10.0), span(1, 2.0, 4.0), span(2, 3.0, 6.0), span(3, 5.0, 5.0), span(4, 11.0, 20.0)];
    let row = flatten(&spans, Lane::Host, 1.0..12.0);
    let found: Vec<(f64, f64, usize)> = row.iter().map(|s| (s.start, s.end, s.label)).collect();
    assert_eq!(found, [(1.0, 2.0, 0), (2.0, 3.0, 1), (3.0, 4.0, 2), (4.0, 6.0, 2), (6.0, 10.0, 0), (11.0, 12.0, 4)]);

    let taken = flatten(&[span(0, 1.5, 2.5), span(0, 5.0, 11.5)], Lane::Host, 0.0..20.0);
    let rest: Vec<(f64, f64, usize)> = without(&row, &taken).iter().map(|s| (s.start, s.end, s.label)).collect();
    assert_eq!(rest, [(1.0, 1.5, 0), (2.5, 3.0, 1), (3.0, 4.0, 2), (4.0, 5.0, 2), (11.5, 12.0, 4)]);

    let merged: Vec<(f64, f64, usize, usize)> =
        merge(&row, 1.5).iter().map(|s| (s.start, s.end, s.label, s.more)).collect();
    // Three short ones become one, 4..6 and 6..10 stay apart, and 11..12 is short and near.
    assert_eq!(merged, [(1.0, 4.0, 0, 2), (4.0, 6.0, 2, 0), (6.0, 12.0, 0, 1)]);
    assert_eq!(merge(&row, 1e-6).len(), 5);
    // Two that touch but for the rounding of the file.
    let touching = flatten(&[span(0, 0.0, 1.0 + 1e-12), span(1, 1.0, 2.0)], Lane::Host, 0.0..9.0);
    assert_eq!(touching.iter().map(|s| s.label).collect::<Vec<_>>(), [0, 1]);
    let nested = flatten(&[span(0, 0.0, 2.0), span(1, 1.0, 1.0 + 1e-12), span(2, 1.5, 2.0)], Lane::Host, 0.0..9.0);
    assert_eq!(nested.iter().map(|s| s.label).collect::<Vec<_>>(), [0, 0, 2]);
}

#[test]
fn the_picture_has_a_bar_for_each_span_and_names_the_waits() {
    let root = tempfile::tempdir().unwrap();
    let mut slow = Timeline::read(&run(root.path(), "slow", 8, 2.0, 1.0), 0).unwrap();
    slow.title = "a <b> & \u{1}\"c\"".into();
    let fast = Timeline::read(&run(root.path(), "fast", 8, 1.0, 0.0), 0).unwrap();
    let svg = draw(&[slow, fast], Some(2..4)).unwrap();
    assert_well_formed(&svg);
    assert!(svg.contains("fill=\"#ffffff\"/>") && svg.contains("a &lt;b&gt; &amp; \u{fffd}&quot;c&quot;"), "{svg}");
    let bars = bars(&svg);
    let count = |text: &str| bars.iter().filter(|(_, _, title)| title.starts_with(text)).count();
    // Each of the two runs shows two steps; the one that does not wait computes through both of them without a gap.
    assert_eq!(count("forward"), 3);
    assert_eq!(count("gather: parameters of &lt;model&gt; &amp; &quot;head&quot;, 1.00 s"), 2);
    assert_eq!(count("reduce"), 4);
    assert_eq!(bars.len(), 9);
    // The device waits in the first half of a step of the slow run and computes in the second, on one scale.
    let pixels = (960.0 - 84.0 - 18.0) / 4.0;
    let waits: Vec<_> = bars.iter().filter(|bar| bar.2.starts_with("gather")).collect();
    assert!((waits[0].0 - 84.0).abs() < 0.11 && (waits[0].1 - pixels).abs() < 0.61, "{waits:?}");
    let forwards: Vec<_> = bars.iter().filter(|bar| bar.2.starts_with("forward")).collect();
    assert!((forwards[0].0 - 84.0 - pixels).abs() < 0.11, "{forwards:?}");
    assert!((forwards[2].0 - 84.0).abs() < 0.11 && (forwards[2].1 - 2.0 * pixels).abs() < 0.61, "{forwards:?}");
    assert_eq!(svg.matches("class=\"steps\"").count(), 2);
    assert!(svg.contains("2 steps, 2.00 s a step, device waits 50.0 %") && svg.contains("device waits 0.0 %"), "{svg}");
    assert!(svg.contains("time (s)") && !svg.contains(">to host<") && svg.contains(">a step begins<"));
}

#[test]
fn crowded_pictures_stay_small() {
    let root = tempfile::tempdir().unwrap();
    let mut events = Vec::new();
    for number in 0..40_000u32 {
        let start = f64::from(number) * 1e-3;
        if number % 10_000 == 0 {
            events.push(mark(start, u64::from(number / 10_000)));
        }
        for lane in ["compute", "comm", "to host", "to device", "host"] {
            events.push(span(lane, &format!("unit {}", number % 97), None, start, start + 0.9e-3));
        }
    }
    let timeline = Timeline::read(&write(root.path(), "run", &events), 0).unwrap();
    let svg = draw(&vec![timeline; 4], None).unwrap();
    assert_well_formed(&svg);
    assert!(svg.len() < 150_000, "{} bytes", svg.len());
    assert!(svg.contains(" more, "), "{svg}");
}

#[test]
fn steps_without_time_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let timeline = Timeline::read(&write(root.path(), "run", &[mark(1.0, 0)]), 0).unwrap();
    assert_eq!(timeline.busy(Lane::Wait), 0.0);
    let error = draw(&[timeline], None).unwrap_err().to_string();
    assert!(error.contains("expected steps in which time passes"), "{error}");
    assert!(draw(&[], None).is_err());
}

#[test]
fn busy_is_the_union_of_spans() {
    let root = tempfile::tempdir().unwrap();
    let timeline = Timeline::read(&run(root.path(), "run", 10, 1.0, 0.25), 0).unwrap();
    assert!((timeline.busy(Lane::Wait) - 0.25).abs() < 1e-9);
    assert!((timeline.busy(Lane::Compute) - 1.0).abs() < 1e-9);
    assert_eq!(timeline.busy(Lane::ToHost), 0.0);
}
