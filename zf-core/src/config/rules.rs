//! Rules across keys, and what this version does not have.

use super::sections::{Accumulate, DeviceKind, DeviceSection, LogSection, ReduceSection, ReduceWhen, RunSection};
use crate::layout::DType;

/// Keys of a section of which one replaces the others when a later layer gives it.
pub(super) const EXCLUSIVE: &[(&str, &[&str])] = &[("run", &["steps", "epochs", "tokens"])];

/// Sections and keys that a later version will have, with what they are for.
pub(super) const NOT_YET: &[(&str, &str)] =
    &[("activation", "recomputation and stores for activations"), ("mesh", "axes beside data parallelism")];

/// The fixed sections.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sections {
    pub(super) run: RunSection,
    pub(super) device: DeviceSection,
    pub(super) reduce: ReduceSection,
    pub(super) log: LogSection,
}

/// A rule that was broken.
#[derive(Debug, PartialEq)]
pub(super) struct Broken {
    /// The key to point at.
    pub(super) key: &'static str,
    /// What is wrong, without the key.
    pub(super) message: String,
    /// What to do.
    pub(super) advice: String,
}

fn broken<T>(key: &'static str, message: impl Into<String>, advice: impl Into<String>) -> Result<T, Broken> {
    Err(Broken { key, message: message.into(), advice: advice.into() })
}

/// Checks all rules. `given` says whether a key was set by any layer.
pub(super) fn check(sections: &Sections, given: &dyn Fn(&str) -> bool, ranks: Option<usize>) -> Result<(), Broken> {
    length(&sections.run)?;
    precision(&sections.run, given)?;
    exact(sections)?;
    devices(&sections.device)?;
    if sections.run.checkpoint.keep == 0 {
        return broken("run.checkpoint.keep", "must be at least 1, found 0", "`every = 0` writes only the last one");
    }
    if sections.run.validate.sequences == Some(0) {
        return broken("run.validate.sequences", "must be at least 1, found 0", "leave it out to take all");
    }
    if sections.log.every == 0 {
        return broken("log.every", "must be at least 1, found 0", "");
    }
    if let Some(ranks) = ranks.filter(|ranks| !(1..=MAX_RANKS).contains(ranks)) {
        return broken("transport.ranks", format!("must be from 1 to {MAX_RANKS}, found {ranks}"), "");
    }
    batch(&sections.run, ranks.unwrap_or(1)).map(drop)
}

/// More ranks than this are a typing error, which would ask for as many threads.
const MAX_RANKS: usize = 1024;

/// The same for sequences in a step, of which each has a place in memory.
const MAX_BATCH: usize = 1 << 24;

/// The micro-batches that each of `ranks` ranks runs in a step, at least 1.
pub(super) fn batch(run: &RunSection, ranks: usize) -> Result<usize, Broken> {
    let (global, micro) = (run.global_batch, run.micro_batch);
    if global == 0 {
        return broken("run.global_batch", "must be at least 1, found 0", "");
    }
    if global > MAX_BATCH {
        return broken("run.global_batch", format!("must be at most {MAX_BATCH}, found {global}"), "");
    }
    if micro == 0 {
        return broken("run.micro_batch", "must be at least 1, found 0", "");
    }
    if ranks == 0 {
        return broken("run.global_batch", "cannot be split over 0 ranks", "");
    }
    let Some(block) = micro.checked_mul(ranks) else {
        return broken("run.micro_batch", format!("{micro} is too large for {ranks} ranks"), "");
    };
    if global.is_multiple_of(block) {
        return Ok(global / block);
    }
    let message = format!(
        "global_batch = {global} is not micro_batch x accumulation x ranks: micro_batch {micro} x ranks {ranks} = \
         {block} does not divide it"
    );
    let below = global / block * block;
    let fitting = [Some(below).filter(|below| *below > 0), below.checked_add(block)];
    let fitting: Vec<String> = fitting.iter().flatten().map(usize::to_string).collect();
    let batches = format!("global_batch {}", fitting.join(" or "));
    // Listing divisors takes the square root of the number, which a typing error can make very long.
    let advice = if global.is_multiple_of(ranks) && global < 1 << 32 {
        let fitting = divisors(global / ranks);
        format!("{batches} fits, or micro_batch {fitting}")
    } else {
        format!("{batches} fits")
    };
    broken("run.global_batch", message, advice)
}

/// The divisors, at most eight of the largest, in words.
fn divisors(number: usize) -> String {
    let small = (1..).take_while(|d| d * d <= number).filter(|d| number.is_multiple_of(*d));
    let mut all: Vec<usize> = small.flat_map(|d| [d, number / d]).collect();
    all.sort_unstable();
    all.dedup();
    let shown: Vec<String> = all.iter().rev().take(8).rev().map(usize::to_string).collect();
    shown.join(", ")
}

fn length(run: &RunSection) -> Result<(), Broken> {
    let lengths = [run.steps.is_some(), run.epochs.is_some(), run.tokens.is_some()];
    match lengths.iter().filter(|given| **given).count() {
        0 => {
            return broken("run", "needs one of `steps`, `epochs` and `tokens`", "for example `steps = 200`");
        }
        1 => {}
        _ => {
            let key = if run.epochs.is_some() { "run.epochs" } else { "run.tokens" };
            return broken(key, "only one of `steps`, `epochs` and `tokens` can be given", "take the others out");
        }
    }
    if run.steps == Some(0) {
        return broken("run.steps", "must be at least 1, found 0", "");
    }
    if run.tokens == Some(0) {
        return broken("run.tokens", "must be at least 1, found 0", "");
    }
    match run.epochs {
        Some(epochs) if !(epochs > 0.0 && epochs.is_finite()) => {
            broken("run.epochs", format!("must be a finite number above 0, found {epochs}"), "")
        }
        _ => Ok(()),
    }
}

fn precision(run: &RunSection, given: &dyn Fn(&str) -> bool) -> Result<(), Broken> {
    if !(run.clip >= 0.0 && run.clip.is_finite()) {
        return broken(
            "run.clip",
            format!("must be a finite number, 0 or more, found {}", run.clip),
            "0 turns clipping off",
        );
    }
    if given("run.loss_scale") && run.dtype != DType::Float16 {
        return broken("run.loss_scale", "has no effect unless `dtype` is \"float16\"", "take it out");
    }
    match run.loss_scale.validate() {
        Ok(()) => Ok(()),
        Err(error) => broken("run.loss_scale", error.to_string(), ""),
    }
}

fn exact(sections: &Sections) -> Result<(), Broken> {
    if !sections.run.exact {
        return Ok(());
    }
    if sections.reduce.when == ReduceWhen::Boundary {
        return broken(
            "reduce.when",
            "\"boundary\" cannot be combined with `run.exact`: exact mode adds micro-batch after micro-batch",
            "use \"micro-batch\" or \"auto\"",
        );
    }
    if sections.reduce.accumulate == Accumulate::Model {
        return broken(
            "reduce.accumulate",
            "\"model\" cannot be combined with `run.exact`: exact mode accumulates in float32",
            "use \"float32\"",
        );
    }
    if sections.device.threads > 1 {
        return broken(
            "device.threads",
            format!(
                "{} cannot be combined with `run.exact`: exact mode runs operators on one thread",
                sections.device.threads
            ),
            "use 1",
        );
    }
    Ok(())
}

fn devices(device: &DeviceSection) -> Result<(), Broken> {
    let smallest = zf_sys::heap::Heap::SMALLEST as u64;
    match (device.kind, device.memory) {
        (DeviceKind::Emulated, None) => {
            return broken(
                "device.kind",
                "\"emulated\" needs `memory`, the size of each rank's device",
                "for example `memory = \"256MiB\"`",
            );
        }
        (DeviceKind::Emulated, Some(size)) if size.0 < smallest => {
            return broken("device.memory", format!("must be at least {smallest} bytes, found {size}"), "");
        }
        (DeviceKind::Auto | DeviceKind::Cpu | DeviceKind::Cuda, Some(_)) => {
            return broken(
                "device.memory",
                "has no effect unless `kind` is \"emulated\"",
                "take it out, or set `kind = \"emulated\"`",
            );
        }
        (_, None) | (DeviceKind::Emulated, Some(_)) => {}
    }
    if !(1..=1024).contains(&device.threads) {
        return broken("device.threads", format!("must be from 1 to 1024, found {}", device.threads), "");
    }
    Ok(())
}
