//! Emulated devices: what to say, and to do, when the memory of one is full.

use std::fmt;

use zf_sys::heap::{ByCategory, Category, Heap, Refusal};

use crate::bytes::ByteSize;
use crate::config::Accumulate;
use crate::layout::{DType, Layout};
use crate::stage::{Keeps, ParametersOn};
use crate::{Error, Result};

/// An allocation that found no place on an emulated device.
#[derive(Debug, Clone, PartialEq)]
pub struct OutOfMemory {
    /// What was wanted, held and free.
    pub refusal: Refusal,
    /// The unit that ran, where that is known.
    pub unit: Option<String>,
    /// What would help, the most promising first.
    pub advice: Vec<String>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { asked, category, live, room, .. } = &self.refusal;
        let size = ByteSize(room.size.unsigned_abs());
        write!(f, "the emulated device of {size} is out of memory: {} MiB wanted for {category}", mib(*asked))?;
        match (self.refusal.phase, &self.unit) {
            (Some(phase), Some(unit)) => write!(f, " in {phase}, unit `{unit}`")?,
            (Some(phase), None) => write!(f, " in {phase}")?,
            (None, Some(unit)) => write!(f, " in unit `{unit}`")?,
            (None, None) => {}
        }
        write!(f, "\n  live: {} MiB (", mib(live.total()))?;
        for (index, category) in Category::ALL.into_iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{category} {}", mib(live[category]))?;
        }
        write!(f, ")\n  free: {} MiB, the largest block {} MiB", mib(room.free), mib(room.largest_free))?;
        self.advice.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// Mebibytes with as many digits as help.
fn mib(bytes: i64) -> String {
    let value = bytes as f64 / f64::from(1 << 20);
    if value >= 1.0 || bytes == 0 { format!("{value:.1}") } else { format!("{value:.4}") }
}

/// Over how many ranks each kind of state is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Parameters.
    pub params: usize,
    /// Accumulated gradients.
    pub grads: usize,
    /// Masters and optimizer states.
    pub optim: usize,
}

impl Split {
    /// The widest groups of a layout.
    pub fn of(layout: &Layout) -> Self {
        let trained = || layout.flats.iter().filter(|flat| flat.trainable && flat.used() > 0);
        Self {
            params: trained().map(|flat| flat.params.group()).max().unwrap_or(1),
            grads: trained().map(|flat| flat.grads.group()).max().unwrap_or(1),
            optim: trained().map(|flat| flat.optim.group()).max().unwrap_or(1),
        }
    }
}

/// What [`advice`] depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Situation {
    /// Bytes wanted, and for what.
    pub asked: (i64, Category),
    /// Live bytes by category.
    pub live: ByCategory,
    /// Whether all free bytes together would have done.
    pub fragmented: bool,
    /// Ranks of the run.
    pub world: usize,
    /// What is split already.
    pub split: Split,
    /// Type of parameters.
    pub dtype: DType,
    /// Type of accumulated gradients.
    pub accumulate: Accumulate,
    /// Whether gradients could accumulate in the model's type: they are reduced once a step, and not in exact mode.
    pub accumulate_free: bool,
    /// Sequences that a rank runs at once.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// What an offload leaves on the device; none without one.
    pub keeps: Option<Keeps>,
    /// Where parameters lie.
    pub parameters: ParametersOn,
    /// Whether the update rule allows an offload.
    pub offloadable: bool,
}

/// A category that holds at least this part of all bytes is worth a line; of six the largest always is.
const WORTH: f64 = 1.0 / 6.0;

/// What would help, the most promising first: for the categories that hold most, those settings of this version that the
/// run does not use yet.
pub fn advice(situation: &Situation) -> Vec<String> {
    let mut wanted = situation.live;
    wanted[situation.asked.1] += situation.asked.0;
    let mut categories = Category::ALL;
    categories.sort_by_key(|&category| -wanted[category]);
    let mut lines = Vec::new();
    if situation.fragmented {
        lines.push(
            "all free blocks together would have been enough: memory is fragmented, which other sizes of \
             `run.micro_batch` may avoid"
                .to_owned(),
        );
    }
    for category in categories {
        let share = wanted[category] as f64 / wanted.total().max(1) as f64;
        if share >= WORTH {
            lines.extend(remedy(category, share, situation));
        }
    }
    lines.push("or give the device more: `device.memory`".to_owned());
    lines
}

/// One line on a category, where there is something to do about it.
fn remedy(category: Category, share: f64, situation: &Situation) -> Option<String> {
    let Situation { world, split, dtype, .. } = *situation;
    let what = match category {
        Category::Optimizer => "optimizer states",
        category => category.name(),
    };
    // The stage that splits it, over how many ranks it is split now, and another way to save.
    let half_precision = (dtype == DType::Float32).then_some("`run.dtype = \"bfloat16\"`");
    let half_gradients = (situation.accumulate == Accumulate::Float32 && situation.accumulate_free)
        .then_some("`reduce.accumulate = \"model\"`")
        .filter(|_| dtype != DType::Float32);
    let apart = (situation.keeps.is_none() && situation.offloadable).then_some("`offload.kind = \"host\"`");
    let far = (situation.keeps == Some(Keeps::Nothing) && situation.parameters == ParametersOn::Device)
        .then_some("`offload.parameters = \"host\"`");
    let settings = match category {
        Category::Optimizer => splitting(1, split.optim, world, apart),
        Category::Gradients => splitting(2, split.grads, world, half_gradients),
        Category::Parameters => splitting(3, split.params, world, half_precision.or(far)),
        Category::Activations if situation.micro_batch > 1 => {
            format!("a smaller `run.micro_batch` than {}", situation.micro_batch)
        }
        Category::Activations => format!("a shorter `data.sequence_length` than {}", situation.sequence_length),
        Category::Buffers if situation.keeps.is_some() => "a smaller `offload.buffer`".into(),
        Category::Buffers if split.params > 1 => "a smaller `partition.max_live_units` or `partition.prefetch`".into(),
        Category::Buffers | Category::Other => return None,
    };
    Some(format!("{what} hold {:.0} %: {settings}", share * 100.0))
}

/// How to split a kind of state further, `else_` where that is another way.
fn splitting(stage: u8, group: usize, world: usize, else_: Option<&str>) -> String {
    let more = if stage < 3 { " or more" } else { "" };
    let split = match (world, group) {
        (1, _) => format!("several ranks with `partition.stage = {stage}`{more}"),
        (_, 1) => format!("`partition.stage = {stage}`{more} splits them over the ranks"),
        (world, group) if group < world => format!("`partition.stage = {stage}` splits them over all {world} ranks"),
        _ => "more ranks, over which they are split".to_owned(),
    };
    else_.map_or_else(|| split.clone(), |setting| format!("{split}; or {setting}"))
}

/// An error that says what was refused, where a refusal of `heap` caused `error`; any other error as it is. `situation` is
/// asked for what the run uses; without an answer there is no advice.
pub(crate) fn explain(error: Error, heap: &Heap, situation: impl FnOnce(&Refusal) -> Result<Situation>) -> Error {
    match error {
        Error::At { rank, step, source } => {
            Error::At { rank, step, source: Box::new(explain(*source, heap, situation)) }
        }
        error => match cause(&error.to_string(), heap) {
            Some(refusal) => {
                let unit = unit(&error.to_string());
                let advice = situation(&refusal).map(|situation| advice(&situation)).unwrap_or_default();
                Error::OutOfMemory(Box::new(OutOfMemory { refusal, unit, advice }))
            }
            None => error,
        },
    }
}

/// The last refusal of `heap`, where an error's text carries its message.
pub(crate) fn cause(text: &str, heap: &Heap) -> Option<Refusal> {
    heap.last_refusal().ok().flatten().filter(|refusal| text.contains(&refusal.message))
}

/// The unit that the engine names in an error.
fn unit(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("unit `")?;
    rest.split_once('`').map(|(name, _)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use zf_sys::heap::Room;

    use super::*;

    fn situation(live: &[(Category, i64)]) -> Situation {
        let mut all = ByCategory::default();
        live.iter().for_each(|&(category, bytes)| all[category] = bytes);
        Situation {
            asked: (1, Category::Activations),
            live: all,
            fragmented: false,
            world: 4,
            split: Split { params: 1, grads: 1, optim: 1 },
            dtype: DType::Bfloat16,
            accumulate: Accumulate::Float32,
            accumulate_free: true,
            micro_batch: 4,
            sequence_length: 64,
            keeps: None,
            parameters: ParametersOn::Device,
            offloadable: false,
        }
    }

    #[test]
    fn what_an_offload_takes_off_the_device() {
        let optimizer = Situation { offloadable: true, world: 1, ..situation(&[(Category::Optimizer, 900)]) };
        let ranks = "optimizer states hold 100 %: several ranks with `partition.stage = 1` or more";
        advised(&optimizer, &[&format!("{ranks}; or `offload.kind = \"host\"`")]);
        advised(&Situation { keeps: Some(Keeps::Chosen), ..optimizer }, &[ranks]);

        let parameters =
            Situation { keeps: Some(Keeps::Nothing), world: 1, ..situation(&[(Category::Parameters, 900)]) };
        let ranks = "parameters hold 100 %: several ranks with `partition.stage = 3`";
        advised(&parameters, &[&format!("{ranks}; or `offload.parameters = \"host\"`")]);
        for other in [
            Situation { keeps: Some(Keeps::Chosen), ..parameters },
            Situation { keeps: None, ..parameters },
            Situation { parameters: ParametersOn::Host, ..parameters },
        ] {
            advised(&other, &[ranks]);
        }

        let buffers = Situation { keeps: Some(Keeps::Nothing), ..situation(&[(Category::Buffers, 900)]) };
        advised(&buffers, &["buffers hold 100 %: a smaller `offload.buffer`"]);
    }

    #[track_caller]
    fn advised(situation: &Situation, expected: &[&str]) {
        let found = advice(situation);
        assert_eq!(found.len(), expected.len() + 1, "{found:#?}");
        for (line, expected) in found.iter().zip(expected) {
            assert_eq!(line, expected);
        }
        assert!(found.last().unwrap().contains("`device.memory`"));
    }

    #[test]
    fn the_biggest_comes_first_and_small_ones_not_at_all() {
        let found = situation(&[
            (Category::Parameters, 100),
            (Category::Optimizer, 600),
            (Category::Activations, 250),
            (Category::Gradients, 50),
        ]);
        advised(
            &found,
            &[
                "optimizer states hold 60 %: `partition.stage = 1` or more splits them over the ranks",
                "activations hold 25 %: a smaller `run.micro_batch` than 4",
            ],
        );
    }

    #[test]
    fn what_the_run_uses_already_is_not_advised() {
        let optimizer = situation(&[(Category::Optimizer, 900)]);
        let one = Situation { world: 1, ..optimizer };
        let part = Situation { split: Split { optim: 2, ..optimizer.split }, ..optimizer };
        let all = Situation { split: Split { optim: 4, ..optimizer.split }, ..optimizer };
        advised(&one, &["optimizer states hold 100 %: several ranks with `partition.stage = 1` or more"]);
        advised(&part, &["optimizer states hold 100 %: `partition.stage = 1` splits them over all 4 ranks"]);
        advised(&all, &["optimizer states hold 100 %: more ranks, over which they are split"]);

        let gradients = situation(&[(Category::Gradients, 900)]);
        let stage = "gradients hold 100 %: `partition.stage = 2` or more splits them over the ranks";
        advised(&gradients, &[&format!("{stage}; or `reduce.accumulate = \"model\"`")]);
        for other in [
            Situation { accumulate: Accumulate::Model, ..gradients },
            Situation { accumulate_free: false, ..gradients },
            Situation { dtype: DType::Float32, ..gradients },
        ] {
            advised(&other, &[stage]);
        }

        let parameters = situation(&[(Category::Parameters, 900)]);
        let stage = "parameters hold 100 %: `partition.stage = 3` splits them over the ranks";
        advised(&parameters, &[stage]);
        let single = Situation { dtype: DType::Float32, ..parameters };
        advised(&single, &[&format!("{stage}; or `run.dtype = \"bfloat16\"`")]);

        let activations = situation(&[(Category::Activations, 900)]);
        let least = Situation { micro_batch: 1, ..activations };
        advised(&least, &["activations hold 100 %: a shorter `data.sequence_length` than 64"]);
    }

    #[test]
    fn buffers_have_a_remedy_where_units_are_gathered() {
        let buffers = situation(&[(Category::Buffers, 900)]);
        advised(&buffers, &[]);
        let gathered = Situation { split: Split { params: 4, grads: 4, optim: 4 }, ..buffers };
        advised(&gathered, &["buffers hold 100 %: a smaller `partition.max_live_units` or `partition.prefetch`"]);
    }

    #[test]
    fn fragmentation_is_named_first() {
        let pieces = Situation { fragmented: true, ..situation(&[(Category::Activations, 900)]) };
        let found = advice(&pieces);
        assert!(found[0].contains("fragmented"), "{found:#?}");
        assert!(found[1].contains("run.micro_batch"), "{found:#?}");
    }

    #[test]
    fn the_message_has_every_figure() {
        let mut live = ByCategory::default();
        live[Category::Parameters] = 64 << 20;
        live[Category::Activations] = 3 << 19;
        let refusal = Refusal {
            number: 1,
            asked: 12 << 20,
            category: Category::Activations,
            phase: Some("backward"),
            live,
            room: Room { size: 80 << 20, free: 14 << 20, largest_free: 8 << 20 },
            message: "heap 'rank 0' is full".into(),
        };
        let error = OutOfMemory { refusal, unit: Some("h.3".into()), advice: vec!["do something".into()] };
        assert_eq!(
            error.to_string(),
            "the emulated device of 80MiB is out of memory: 12.0 MiB wanted for activations in backward, unit `h.3`\n  \
             live: 65.5 MiB (parameters 64.0, gradients 0.0, optimizer 0.0, activations 1.5, buffers 0.0, other 0.0)\n  \
             free: 14.0 MiB, the largest block 8.0 MiB\n  do something"
        );
    }
}
