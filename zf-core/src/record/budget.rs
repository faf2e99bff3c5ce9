//! Where the time of a step goes.

use super::step::StepRecord;
use super::summary::median;

/// Records that are left out at the beginning: the first steps allocate, measure and fill caches.
const WARM_UP: usize = 3;

/// From this many records on.
const LONG: usize = 10;

/// Where the time of a step goes on rank 0, over the records of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    /// Records that count.
    pub records: usize,
    /// Records at the beginning that do not.
    pub warm_up: usize,
    /// The parts of the step in the order of the work, then the step, then the host beside it.
    pub rows: Vec<BudgetRow>,
    /// Seconds a step that the parts have in common, because they go on at once.
    pub overlap: f64,
    /// What crossed the link; none where nothing did.
    pub link: Option<LinkUse>,
}

/// One kind of time. Means add up, medians do not: work of every fourth step has a median of 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BudgetRow {
    /// `forward`, `backward`, `update`, `comm`, `stall`, `other`, `step` or `host`.
    pub name: &'static str,
    /// Median, in seconds a step.
    pub median: f64,
    /// Mean, in seconds a step.
    pub mean: f64,
    /// The value that 99 % of the steps do not exceed, in seconds.
    pub p99: f64,
    /// The mean's part of the mean step: 0 to 1, `host` also more where several workers' time is added.
    pub share: f64,
}

/// What crossed the link between device and host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkUse {
    /// Bytes a step from the device, the mean.
    pub to_host: f64,
    /// Bytes a step to the device, the mean.
    pub to_device: f64,
    /// Bytes a step of columns that changed their tier, in the others or beside them as the run counts, the mean.
    pub moves: f64,
}

impl Budget {
    /// The budget by the records of a run, in their order; none of no record. Of more than ten records the first three
    /// are left out.
    pub fn of(records: &[StepRecord]) -> Option<Self> {
        let warm_up = if records.len() > LONG { WARM_UP } else { 0 };
        let counted = &records[warm_up..];
        let (first, last) = (counted.first()?, counted.last()?);
        let mean = |f: &dyn Fn(&StepRecord) -> f64| counted.iter().map(f).sum::<f64>() / counted.len() as f64;
        let step = mean(&|r| r.seconds.step);
        let row = |name, f: &dyn Fn(&StepRecord) -> f64| {
            let values: Vec<f64> = counted.iter().map(f).collect();
            let mean = mean(f);
            let share = if step > 0.0 { mean / step } else { 0.0 };
            BudgetRow { name, p99: percentile(values.clone(), 0.99), median: median(values), mean, share }
        };
        let parts = |r: &StepRecord| {
            r.seconds.forward + r.seconds.backward + r.seconds.update + r.seconds.comm + r.seconds.stall
        };
        let mut rows = vec![
            row("forward", &|r| r.seconds.forward),
            row("backward", &|r| r.seconds.backward),
            row("update", &|r| r.seconds.update),
            row("comm", &|r| r.seconds.comm),
            row("stall", &|r| r.seconds.stall),
            row("other", &|r| (r.seconds.step - parts(r)).max(0.0)),
            row("step", &|r| r.seconds.step),
            row("host", &|r| r.seconds.host),
        ];
        rows.retain(|row| row.name == "step" || row.mean != 0.0);
        // A record counts the bytes since the one before.
        let before = warm_up.checked_sub(1).map(|index| records[index].step);
        let steps = before.map_or(last.step.saturating_sub(first.step) + 1, |before| last.step.saturating_sub(before));
        let bytes = |f: fn(&StepRecord) -> u64| counted.iter().map(|r| f(r) as f64).sum::<f64>() / steps.max(1) as f64;
        let link = LinkUse {
            to_host: bytes(|r| r.link_bytes.to_host),
            to_device: bytes(|r| r.link_bytes.to_device),
            moves: bytes(|r| r.link_bytes.moves),
        };
        Some(Self {
            records: counted.len(),
            warm_up,
            rows,
            overlap: mean(&|r| (parts(r) - r.seconds.step).max(0.0)),
            link: (link.to_host + link.to_device + link.moves > 0.0).then_some(link),
        })
    }

    /// The row of this name, where it is not 0 throughout.
    pub fn row(&self, name: &str) -> Option<&BudgetRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The least part of the host's time that the device did not wait for: 1 means that it is hidden altogether. None
    /// where the host had nothing to do.
    pub fn hidden(&self) -> Option<f64> {
        let host = self.row("host")?.mean;
        let stall = self.row("stall").map_or(0.0, |row| row.mean);
        (host > 0.0).then(|| (1.0 - stall / host).clamp(0.0, 1.0))
    }
}

/// The smallest value that at least `part` of the values do not exceed; NaN of nothing.
fn percentile(mut values: Vec<f64>, part: f64) -> f64 {
    values.retain(|value| !value.is_nan());
    values.sort_by(f64::total_cmp);
    let rank = (part * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{LinkBytes, Seconds};

    fn record(step: u64, seconds: Seconds) -> StepRecord {
        StepRecord { step, seconds, ..StepRecord::default() }
    }

    fn plain(step: u64, stall: f64) -> StepRecord {
        let seconds =
            Seconds { forward: 1.0, backward: 2.0, update: 0.5, stall, step: 4.0 + stall, ..Seconds::default() };
        record(step, seconds)
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-12 * a.abs().max(1.0), "{a} and {b}");
    }

    #[test]
    fn means_add_up_to_the_step() {
        // Every fourth step waits: its median stall is 0, its mean is not.
        let records: Vec<_> = (0..8).map(|step| plain(step, if step % 4 == 3 { 4.0 } else { 0.0 })).collect();
        let budget = Budget::of(&records).unwrap();
        assert_eq!((budget.records, budget.warm_up), (8, 0));
        let names: Vec<&str> = budget.rows.iter().map(|row| row.name).collect();
        assert_eq!(names, ["forward", "backward", "update", "stall", "other", "step"]);
        let stall = budget.row("stall").unwrap();
        assert_eq!((stall.median, stall.mean, stall.p99), (0.0, 1.0, 4.0));
        close(stall.share, 0.2);
        close(budget.row("other").unwrap().mean, 0.5);
        let shares: f64 = budget.rows.iter().filter(|row| row.name != "step").map(|row| row.share).sum();
        close(shares, 1.0);
        close(budget.row("step").unwrap().share, 1.0);
        assert_eq!((budget.overlap, budget.link, budget.hidden()), (0.0, None, None));
    }

    #[test]
    fn the_beginning_of_a_long_run_does_not_count() {
        let mut records: Vec<_> = (0..11).map(|step| plain(step, 0.0)).collect();
        for record in &mut records[..3] {
            record.seconds.step = 1e6;
            record.link_bytes.to_host = 1 << 40;
        }
        let budget = Budget::of(&records).unwrap();
        assert_eq!((budget.records, budget.warm_up), (8, 3));
        assert_eq!(budget.row("step").unwrap().p99, 4.0);
        assert_eq!(budget.link, None);
        let budget = Budget::of(&records[..10]).unwrap();
        assert_eq!((budget.records, budget.warm_up), (10, 0));
        assert_eq!(budget.row("step").unwrap().p99, 1e6);
    }

    #[test]
    fn overlap_and_the_hidden_part_of_the_host() {
        let seconds =
            Seconds { forward: 3.0, backward: 6.0, comm: 2.0, stall: 0.5, step: 10.0, host: 10.0, update: 0.0 };
        let budget = Budget::of(&[record(0, seconds)]).unwrap();
        close(budget.overlap, 1.5);
        close(budget.hidden().unwrap(), 0.95);
        assert_eq!(budget.rows.last().unwrap().name, "host");
        close(budget.rows.last().unwrap().share, 1.0);
        // A stall that has nothing to do with the host hides nothing more than all of it.
        let budget = Budget::of(&[record(0, Seconds { stall: 20.0, ..seconds })]).unwrap();
        assert_eq!(budget.hidden(), Some(0.0));
    }

    #[test]
    fn bytes_are_those_of_a_step_also_where_lines_are_rare() {
        let record =
            |step| StepRecord { link_bytes: LinkBytes { to_host: 50, to_device: 100, moves: 5 }, ..plain(step, 0.0) };
        let every_step: Vec<_> = (0..4).map(record).collect();
        let link = Budget::of(&every_step).unwrap().link.unwrap();
        assert_eq!(link, LinkUse { to_host: 50.0, to_device: 100.0, moves: 5.0 });
        let every_fifth: Vec<_> = (0..20).map(|line| record(5 * line)).collect();
        let link = Budget::of(&every_fifth).unwrap().link.unwrap();
        assert_eq!(link, LinkUse { to_host: 10.0, to_device: 20.0, moves: 1.0 });
    }

    #[test]
    fn records_that_say_little_are_survived() {
        assert_eq!(Budget::of(&[]), None);
        let budget = Budget::of(&[StepRecord::default()]).unwrap();
        assert_eq!(budget.rows.len(), 1);
        assert_eq!(budget.rows[0].share, 0.0);
        let nan = Seconds { step: f64::NAN, forward: 1.0, ..Seconds::default() };
        let budget = Budget::of(&[record(5, nan), record(3, nan)]).unwrap();
        assert_eq!(budget.row("forward").unwrap().share, 0.0);
    }
}
