//! From a Chrome trace to a timeline.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Label, Span, Step, Timeline};
use crate::trace::Lane;
use crate::{Error, Result};

/// No trace lasts thirty years: a larger time is damage, with which nothing can be drawn.
const LONGEST_MICROS: f64 = 1e15;

pub(super) fn read(folder: &Path, rank: usize) -> Result<Timeline> {
    let path = file(folder, rank);
    let text = fs::read(&path).map_err(|e| {
        Error::Input(format!(
            "{}: expected the trace of a run, which it writes at its end where `log.trace` is true: {e}",
            path.display()
        ))
    })?;
    let mut found = Found { rank: rank as u64, ..Found::default() };
    let mut json = serde_json::Deserializer::from_slice(&text);
    TraceSeed(&mut found).deserialize(&mut json).and_then(|()| json.end()).map_err(|e| {
        Error::Input(format!(
            "{}: expected the trace of a run: {e}; if the file was cut short, run again to have it whole",
            path.display()
        ))
    })?;
    found.timeline(folder).map_err(|what| Error::Input(format!("{}: {what}", path.display())))
}

/// The file that holds the rank's events.
fn file(folder: &Path, rank: usize) -> PathBuf {
    let own = folder.join(format!("trace.rank-{rank}.json"));
    if rank > 0 && own.exists() { own } else { folder.join("trace.json") }
}

/// What was found of one rank so far.
#[derive(Default)]
struct Found {
    rank: u64,
    ranks: BTreeSet<u64>,
    spans: Vec<Span>,
    labels: HashMap<Label, usize>,
    marks: Vec<(f64, u64)>,
}

/// One event; what other events than spans and marks have is passed over.
#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    name: String,
    #[serde(default)]
    cat: String,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Args {
    reason: Option<String>,
    step: Option<u64>,
}

impl Found {
    fn add(&mut self, event: Event) -> Result<(), String> {
        self.ranks.insert(event.pid);
        if event.pid != self.rank {
            return Ok(());
        }
        let seconds = |what: &str, micros: Option<f64>| match micros {
            Some(micros) if (0.0..=LONGEST_MICROS).contains(&micros) => Ok(micros / 1e6),
            Some(micros) => {
                Err(format!("expected `{what}` from 0 to {LONGEST_MICROS:e} microseconds, found {micros:e}"))
            }
            None => Err(format!("expected `{what}` in an event of the kind {:?}", event.ph)),
        };
        match event.ph.as_str() {
            "X" => {
                let (start, length) = (seconds("ts", event.ts)?, seconds("dur", event.dur)?);
                // Another program may have added lanes of its own.
                if let Some(lane) = Lane::ALL.into_iter().find(|lane| lane.name() == event.cat) {
                    let next = self.labels.len();
                    let label = Label { name: event.name, reason: event.args.reason };
                    let label = *self.labels.entry(label).or_insert(next);
                    self.spans.push(Span { lane, label, start, end: start + length });
                }
            }
            "i" if event.cat == "step" => {
                let number = event.args.step.ok_or("expected `args.step` in the mark of a step")?;
                self.marks.push((seconds("ts", event.ts)?, number));
            }
            _ => {}
        }
        Ok(())
    }

    fn timeline(mut self, folder: &Path) -> Result<Timeline, String> {
        if !self.ranks.contains(&self.rank) {
            let ranks: Vec<String> = self.ranks.iter().map(u64::to_string).collect();
            let ranks = if ranks.is_empty() { "none".into() } else { ranks.join(", ") };
            return Err(format!("expected events of rank {}, found those of these ranks: {ranks}", self.rank));
        }
        self.marks.sort_by(|a, b| a.0.total_cmp(&b.0));
        if self.marks.is_empty() {
            return Err(format!(
                "expected marks where the steps of rank {} begin, found none; the run did no step, or an earlier version wrote \
                 its trace",
                self.rank
            ));
        }
        if let Some(pair) = self.marks.windows(2).find(|pair| pair[1].1 <= pair[0].1) {
            return Err(format!(
                "expected steps in ascending order, found step {} after step {}",
                pair[1].1, pair[0].1
            ));
        }
        // Of spans that begin together the outer one comes first.
        self.spans.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
        let mut labels: Vec<(Label, usize)> = self.labels.into_iter().collect();
        labels.sort_by_key(|(_, index)| *index);
        let labels: Vec<Label> = labels.into_iter().map(|(label, _)| label).collect();
        let steps = steps(&self.marks, &self.spans, &labels);
        let title = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
        let title = title.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        Ok(Timeline { title, spans: self.spans, labels, steps })
    }
}

/// The steps between the marks. The last one ends with its work.
fn steps(marks: &[(f64, u64)], spans: &[Span], labels: &[Label]) -> Vec<Step> {
    let disturbs = |span: &Span| span.lane == Lane::Checkpoint || labels[span.label].name == "validation";
    let works = |span: &Span| matches!(span.lane, Lane::Compute | Lane::Wait) && !disturbs(span);
    let from = |time: f64| spans.partition_point(|span| span.start < time);
    let ends = marks.iter().skip(1).map(|mark| Some(mark.0)).chain([None]);
    let step = |(&(start, number), next): (&(f64, u64), Option<f64>)| {
        let inside = &spans[from(start)..next.map_or(spans.len(), from)];
        let work = || inside.iter().filter(|span| works(span)).map(|span| span.end).fold(start, f64::max);
        Step { number, start, end: next.unwrap_or_else(work), quiet: !inside.iter().any(disturbs) }
    };
    marks.iter().zip(ends).map(step).collect()
}

/// Reads the whole file, keeping only what [`Found`] wants.
struct TraceSeed<'a>(&'a mut Found);

impl<'de> DeserializeSeed<'de> for TraceSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TraceSeed<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object with `traceEvents`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut any = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "traceEvents" {
                map.next_value_seed(EventsSeed(&mut *self.0))?;
                any = true;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if any { Ok(()) } else { Err(A::Error::custom("no `traceEvents` in it")) }
    }
}

struct EventsSeed<'a>(&'a mut Found);

impl<'de> DeserializeSeed<'de> for EventsSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EventsSeed<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while let Some(event) = events.next_element::<Event>()? {
            self.0.add(event).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}
