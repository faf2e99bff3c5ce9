//! Which rank computes which sequences of a step, and the tensors of one micro-batch.

use tch::{Device, Tensor};

use super::{Dataset, Order, Split};
use crate::model::{Batch, IGNORE};
use crate::{Error, Result};

/// The batch triple of a run: global batch = micro-batch x accumulation x ranks.
///
/// Micro-batch i of a step (from 0) holds the positions `step * global + i * micro ..` of the run. In exact mode it is
/// computed by rank i mod N in its turn i div N, so that all ranks walk through the batch together in the order of i.
/// Otherwise every rank has one contiguous block of the batch.
///
/// ```
/// use zf_core::data::BatchPlan;
///
/// let plan = BatchPlan::new(8, 2, 2, false)?;
/// assert_eq!(plan.accumulation(), 2);
/// assert_eq!(plan.turns(0, 1)[0].sequences, [4, 5]);
/// # Ok::<(), zf_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    global: u64,
    micro: u64,
    world: u64,
    exact: bool,
}

/// One micro-batch of one rank in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Index of the micro-batch in the step, over all ranks.
    pub index: u64,
    /// Position in the run of its first sequence, to be given to [`Order::at`].
    pub first_position: u64,
    /// For each of its sequences the index within the step's global batch.
    pub sequences: Vec<u64>,
}

impl BatchPlan {
    /// The plan for `global` sequences a step, `micro` sequences a micro-batch and `world` ranks.
    ///
    /// # Errors
    /// [`Error::Config`] when a value is 0 or the global batch is no multiple of `micro * world`; the message says
    /// which values would fit.
    pub fn new(global: usize, micro: usize, world: usize, exact: bool) -> Result<Self> {
        for (name, value) in [("run.global_batch", global), ("run.micro_batch", micro), ("ranks", world)] {
            if value == 0 {
                return Err(Error::Config(format!("{name} must be at least 1, found 0")));
            }
        }
        let together = micro
            .checked_mul(world)
            .ok_or_else(|| Error::Config(format!("run.micro_batch = {micro} times {world} ranks overflows")))?;
        if !global.is_multiple_of(together) {
            return Err(Error::Config(misfit(global, micro, world, together)));
        }
        Ok(Self { global: global as u64, micro: micro as u64, world: world as u64, exact })
    }

    /// Sequences of a step, over all ranks.
    pub fn global_batch(&self) -> u64 {
        self.global
    }

    /// Sequences of a micro-batch.
    pub fn micro_batch(&self) -> u64 {
        self.micro
    }

    /// Micro-batches of each rank in a step.
    pub fn accumulation(&self) -> u64 {
        self.global / (self.micro * self.world)
    }

    /// The micro-batches of `rank` (below the number of ranks) in `step`, in the order in which it computes them.
    pub fn turns(&self, step: u64, rank: usize) -> Vec<Turn> {
        let rank = rank as u64;
        debug_assert!(rank < self.world, "rank {rank} of {}", self.world);
        (0..self.accumulation())
            .map(|turn| {
                let index = if self.exact { turn * self.world + rank } else { rank * self.accumulation() + turn };
                let first = index * self.micro;
                Turn {
                    index,
                    first_position: step * self.global + first,
                    sequences: (first..first + self.micro).collect(),
                }
            })
            .collect()
    }
}

/// Reads the sequences of `turn` into int64 tensors `[micro, L]` on `device`.
///
/// # Errors
/// [`Error::Input`] when the split has no sequence; errors of the dataset and of libtorch.
pub fn assemble(dataset: &dyn Dataset, order: &Order, split: Split, turn: &Turn, device: Device) -> Result<Batch> {
    if dataset.is_empty(split) {
        return Err(Error::Input(format!(
            "the {} part of the data has no sequence",
            match split {
                Split::Train => "training",
                Split::Validation => "validation",
            }
        )));
    }
    let (rows, length) = (turn.sequences.len(), dataset.sequence_length());
    let mut inputs = vec![0_i64; rows * length];
    let mut targets = vec![IGNORE; rows * length];
    let places = inputs.chunks_exact_mut(length).zip(targets.chunks_exact_mut(length));
    for (position, (inputs, targets)) in (turn.first_position..).zip(places) {
        let (_, index) = order.at(position);
        dataset.read(split, index, inputs, targets)?;
    }
    let target_tokens = targets.iter().filter(|&&id| id != IGNORE).count() as u64;
    let shape = [rows as i64, length as i64];
    let tensor = |ids: &[i64]| -> Result<Tensor> { Ok(Tensor::f_from_slice(ids)?.f_view(shape)?.f_to_device(device)?) };
    Ok(Batch { inputs: tensor(&inputs)?, targets: tensor(&targets)?, sequences: turn.sequences.clone(), target_tokens })
}

/// The message for a batch that does not divide, with the nearest values that fit.
fn misfit(global: usize, micro: usize, world: usize, together: usize) -> String {
    let below = global / together * together;
    let mut fits = Vec::new();
    if below > 0 {
        fits.push(below.to_string());
    }
    fits.extend(below.checked_add(together).map(|above| above.to_string()));
    let mut message = format!(
        "run.global_batch = {global} is no multiple of run.micro_batch = {micro} times {world} ranks = {together}; \
         run.global_batch = {} would fit",
        fits.join(" or ")
    );
    if global.is_multiple_of(world) {
        let share = global / world;
        // The largest micro-batch not above the wanted one keeps the memory within what was asked for.
        if let Some(micro) = (1..=micro.min(share)).rev().find(|m| share.is_multiple_of(*m)) {
            message.push_str(&format!(", or run.micro_batch = {micro}"));
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::OrderKind;

    proptest! {
        #[test]
        fn a_step_is_covered_once_by_any_ranks(
            micro in 1_usize..4, accumulation in 1_usize..4, world in 1_usize..5, step in 0_u64..9, exact: bool,
        ) {
            let global = micro * accumulation * world;
            let plan = BatchPlan::new(global, micro, world, exact).unwrap();
            prop_assert_eq!(plan.accumulation(), accumulation as u64);
            let mut positions = Vec::new();
            for rank in 0..world {
                let turns = plan.turns(step, rank);
                prop_assert_eq!(turns.len(), accumulation);
                for turn in turns {
                    prop_assert_eq!(turn.sequences.len(), micro);
                    prop_assert_eq!(turn.sequences[0], turn.index * micro as u64);
                    prop_assert_eq!(turn.first_position, step * global as u64 + turn.sequences[0]);
                    positions.extend(turn.sequences);
                }
            }
            positions.sort_unstable();
            prop_assert_eq!(positions, (0..global as u64).collect::<Vec<_>>());
        }

        #[test]
        fn suggested_values_fit(global in 1_usize..40, micro in 1_usize..9, world in 1_usize..6) {
            if let Err(error) = BatchPlan::new(global, micro, world, true) {
                let message = error.to_string();
                let (_, advice) = message.split_once("; run.global_batch = ").unwrap();
                let (globals, micros) = match advice.split_once(", or run.micro_batch = ") {
                    Some((globals, micro)) => (globals, Some(micro)),
                    None => (advice, None),
                };
                for fit in globals.trim_end_matches(" would fit").split(" or ") {
                    prop_assert!(BatchPlan::new(fit.parse().unwrap(), micro, world, true).is_ok());
                }
                if let Some(fit) = micros {
                    prop_assert!(BatchPlan::new(global, fit.parse().unwrap(), world, true).is_ok());
                }
            }
        }
    }

    #[test]
    fn exact_mode_deals_and_fast_mode_cuts() {
        let first = |exact, rank| -> Vec<u64> {
            let plan = BatchPlan::new(12, 2, 3, exact).unwrap();
            plan.turns(1, rank).iter().map(|t| t.first_position).collect()
        };
        assert_eq!(first(true, 1), [14, 20]);
        assert_eq!(first(false, 1), [16, 18]);
    }

    #[test]
    fn wrong_triples_say_what_fits() {
        for (global, micro, world, expected) in [
            (10, 4, 1, "8 or 12 would fit, or run.micro_batch = 2"),
            (3, 2, 2, "run.global_batch = 4 would fit"),
            (0, 1, 1, "run.global_batch must be at least 1"),
            (4, 0, 1, "run.micro_batch must be at least 1"),
            (4, 1, 0, "ranks must be at least 1"),
            (4, usize::MAX, 2, "overflows"),
        ] {
            let error = BatchPlan::new(global, micro, world, false).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    /// Sequence i holds i in every input, and only its first i targets count.
    struct Counting(u64);

    impl Dataset for Counting {
        fn len(&self, split: Split) -> u64 {
            if split == Split::Train { self.0 } else { 0 }
        }

        fn sequence_length(&self) -> usize {
            4
        }

        fn read(&self, _: Split, index: u64, inputs: &mut [i64], targets: &mut [i64]) -> Result<()> {
            inputs.fill(index as i64);
            for (i, target) in targets.iter_mut().enumerate() {
                *target = if (i as u64) < index { 7 } else { IGNORE };
            }
            Ok(())
        }

        fn identity(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn assembles_across_an_epoch() {
        let data = Counting(3);
        let order = Order::new(3, 0, OrderKind::Sequential);
        let plan = BatchPlan::new(4, 2, 1, false).unwrap();
        let turn = &plan.turns(0, 0)[1];
        let batch = assemble(&data, &order, Split::Train, turn, Device::Cpu).unwrap();
        assert_eq!(batch.inputs.size(), [2, 4]);
        assert_eq!(batch.inputs.kind(), tch::Kind::Int64);
        assert_eq!(batch.inputs.int64_value(&[0, 0]), 2);
        assert_eq!(batch.inputs.int64_value(&[1, 3]), 0);
        assert_eq!(batch.targets.int64_value(&[0, 2]), IGNORE);
        assert_eq!(batch.sequences, [2, 3]);
        assert_eq!(batch.target_tokens, 2);
        let error = assemble(&data, &order, Split::Validation, turn, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("validation part"), "{error}");
    }
}
