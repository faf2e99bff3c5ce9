//! Runs as pictures: what the device, the links and the host did in some steps, drawn as SVG from the traces of run
//! folders, several runs one above the other on one time scale.
//!
//! ```
//! use zf_core::record::timeline::{Timeline, draw};
//! use zf_core::trace::{Lane, Trace, write_traces};
//!
//! let folder = tempfile::tempdir()?;
//! let trace = Trace::new(0, 100);
//! for step in 0..3 {
//!     trace.step(step);
//!     let _span = trace.span(Lane::Compute, "forward");
//!     std::thread::sleep(std::time::Duration::from_millis(1));
//! }
//! write_traces(&folder.path().join("trace.json"), &[trace])?;
//! let picture = draw(&[Timeline::read(folder.path(), 0)?], Some(1..3))?;
//! assert!(picture.starts_with("<svg "));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod choose;
mod read;
mod rows;
mod svg;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::Path;

use crate::Result;
use crate::trace::Lane;

/// The file's name in the run folder, unless told otherwise.
pub const TIMELINE: &str = "timeline.svg";

/// What one rank of a run did, by its trace. Times are seconds since the process began.
#[derive(Debug, Clone)]
pub struct Timeline {
    /// What stands above the picture; the name of the run folder unless set.
    pub title: String,
    /// In the order of their beginnings.
    spans: Vec<Span>,
    labels: Vec<Label>,
    steps: Vec<Step>,
}

/// One step of a [`Timeline`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Its number, from 0.
    pub number: u64,
    /// When it began, in seconds.
    pub start: f64,
    /// When the next one began, or the work of this one ended, in seconds.
    pub end: f64,
    /// Whether neither a validation nor a checkpoint began in it.
    quiet: bool,
}

/// Time in a lane, with an index into the labels.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Span {
    lane: Lane,
    label: usize,
    start: f64,
    end: f64,
}

/// What a span is called, and what is waited for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Label {
    name: String,
    reason: Option<String>,
}

impl Timeline {
    /// Reads the trace of `rank` in a run folder: `trace.rank-R.json` where that process wrote its own, else
    /// `trace.json`.
    ///
    /// # Errors
    /// [`crate::Error::Input`] naming the file when it is missing, no whole trace, without the rank or without a step.
    pub fn read(folder: &Path, rank: usize) -> Result<Self> {
        read::read(folder, rank)
    }

    /// The steps that the trace holds, in their order: at least one.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The share of the time from the first step's beginning to the last step's end in which `lane` had at least one span.
    pub fn busy(&self, lane: Lane) -> f64 {
        match (self.steps.first(), self.steps.last()) {
            (Some(first), Some(last)) if first.start < last.end => {
                self.seconds(lane, first.start..last.end) / (last.end - first.start)
            }
            _ => 0.0,
        }
    }

    /// Seconds of `window` in which `lane` had at least one span.
    fn seconds(&self, lane: Lane, window: Range<f64>) -> f64 {
        rows::flatten(&self.spans, lane, window).iter().fold(0.0, |sum, segment| sum + (segment.end - segment.start))
    }
}

/// Draws runs one above the other, as a self-contained SVG on white.
///
/// `steps` are those drawn of every run. Without them the longest four steps from the middle of a run set the time
/// scale, and of the other runs as many are drawn as fit into the same time; steps with a validation or a checkpoint are
/// avoided where possible. Spans closer than half a pixel are drawn as one; in crowded pictures the distance grows until
/// the picture has less than 150 kB.
///
/// # Errors
/// [`crate::Error::Input`] naming the run that lacks a step, or saying that no time passes in the steps.
pub fn draw(timelines: &[Timeline], steps: Option<Range<u64>>) -> Result<String> {
    svg::draw(timelines, &choose::choose(timelines, steps)?)
}
