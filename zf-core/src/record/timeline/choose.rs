//! Which steps are drawn.

use std::ops::Range;

use super::{Step, Timeline};
use crate::{Error, Result};

/// Steps of the run that sets the time scale.
const STEPS: usize = 4;

/// For each run the range of its steps that is drawn; see [`super::draw`].
pub(super) fn choose(timelines: &[Timeline], wanted: Option<Range<u64>>) -> Result<Vec<Range<usize>>> {
    if let Some(wanted) = wanted {
        return timelines.iter().map(|timeline| find(timeline, &wanted)).collect();
    }
    let middles: Vec<Range<usize>> = timelines.iter().map(|timeline| middle(&timeline.steps)).collect();
    let lengths = timelines.iter().zip(&middles).map(|(timeline, range)| seconds(&timeline.steps, range));
    let longest = lengths.fold(0.0, f64::max);
    Ok(timelines.iter().zip(middles).map(|(timeline, range)| fill(&timeline.steps, range, longest)).collect())
}

fn find(timeline: &Timeline, wanted: &Range<u64>) -> Result<Range<usize>> {
    let steps = &timeline.steps;
    let at = |number: u64| steps.partition_point(|step| step.number < number);
    let range = at(wanted.start)..at(wanted.end);
    match (steps.first(), steps.last()) {
        _ if !range.is_empty() && range.len() as u64 == wanted.end - wanted.start => Ok(range),
        (Some(first), Some(last)) => Err(Error::Input(format!(
            "{}: expected steps {} to {} in the trace, which holds steps {} to {}",
            timeline.title,
            wanted.start,
            wanted.end.saturating_sub(1),
            first.number,
            last.number
        ))),
        _ => Err(Error::Input(format!("{}: the trace holds no step", timeline.title))),
    }
}

/// The undisturbed steps nearest the middle; the middle ones where there are none.
fn middle(steps: &[Step]) -> Range<usize> {
    let count = STEPS.min(steps.len());
    let center = (steps.len() - count) / 2;
    let disturbed = |first: usize| !steps[first..first + count].iter().all(|step| step.quiet);
    let best = (0..=steps.len() - count).min_by_key(|&first| (disturbed(first), first.abs_diff(center)));
    let first = best.unwrap_or(center);
    first..first + count
}

/// `range` with undisturbed steps after it, then before it, as many as fit into `limit` seconds.
fn fill(steps: &[Step], mut range: Range<usize>, limit: f64) -> Range<usize> {
    let fits = |range: &Range<usize>| seconds(steps, range) <= limit;
    while steps.get(range.end).is_some_and(|step| step.quiet) && fits(&(range.start..range.end + 1)) {
        range.end += 1;
    }
    while range.start > 0 && steps[range.start - 1].quiet && fits(&(range.start - 1..range.end)) {
        range.start -= 1;
    }
    range
}

fn seconds(steps: &[Step], range: &Range<usize>) -> f64 {
    match &steps[range.clone()] {
        [first, .., last] => last.end - first.start,
        [only] => only.end - only.start,
        [] => 0.0,
    }
}
