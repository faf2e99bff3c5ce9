//! Sums over whole tensors that an update rule asks for, from the parts that each rank owns.

use crate::norm::ExactSum;
use crate::stage::{Needs, Optimizer, SquareSums};
use crate::{Error, Result};

use super::core::Core;
use super::update::{Update, on_host};

/// By flat and slot, the sums of [`Needs::TensorSums`]; empty where the rule needs none. The same on all ranks.
#[derive(Debug, Default)]
pub(crate) struct TensorSums {
    by_flat: Vec<Vec<Vec<f64>>>,
}

impl TensorSums {
    /// Adds up the parts of all ranks, each element once, in one message.
    pub(crate) fn gather(
        core: &mut Core,
        optimizer: &dyn Optimizer,
        updates: &[Update<'_>],
        exact: bool,
    ) -> Result<Self> {
        let Needs::TensorSums(wanted) = optimizer.needs() else { return Ok(Self::default()) };
        let mut parts: Vec<Part> = Vec::new();
        let mut places = Vec::new();
        for update in updates {
            let flat = &core.flats[update.flat];
            let first = parts.len();
            parts.extend((0..flat.spec.slots.len()).map(|_| Part::new(wanted, exact)));
            for segment in update.segments(flat, &flat.reduction.summed) {
                let hyper = update.hyper(flat, segment.slot);
                let sums = &mut parts[first + segment.slot];
                on_host(flat, &segment, &[], &mut |slice| optimizer.partial(slice, &hyper, sums))?;
            }
            places.push((update.flat, first, flat.spec.slots.len()));
        }
        let message: Vec<u8> = parts.iter().flat_map(Part::to_bytes).collect();
        let answers = core.transport.exchange("tensor sums", message)?;
        let mut totals: Vec<Part> = parts.iter().map(|_| Part::new(wanted, exact)).collect();
        for (rank, answer) in answers.iter().enumerate() {
            let mut rest = answer.as_slice();
            for total in &mut totals {
                rest = total
                    .merge(rest)
                    .ok_or_else(|| Error::comm(format!("rank {rank} sent a garbled message of tensor sums")))?;
            }
        }
        let mut by_flat: Vec<Vec<Vec<f64>>> = core.flats.iter().map(|_| Vec::new()).collect();
        for (flat, first, slots) in places {
            by_flat[flat] = totals[first..first + slots].iter().map(Part::values).collect();
        }
        Ok(Self { by_flat })
    }

    /// The sums of one slot.
    pub(crate) fn of(&self, flat: usize, slot: usize) -> &[f64] {
        self.by_flat.get(flat).and_then(|slots| slots.get(slot)).map_or(&[], Vec::as_slice)
    }
}

/// The sums of one slot as they grow: in float64, or without rounding.
#[derive(Debug)]
enum Part {
    Fast(Vec<f64>),
    Exact(Vec<ExactSum>),
}

impl Part {
    fn new(sums: usize, exact: bool) -> Self {
        if exact { Self::Exact(vec![ExactSum::new(); sums]) } else { Self::Fast(vec![0.0; sums]) }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Fast(sums) => sums.iter().flat_map(|sum| sum.to_le_bytes()).collect(),
            Self::Exact(sums) => sums.iter().flat_map(ExactSum::to_bytes).collect(),
        }
    }

    /// Adds another rank's sums from the front of `bytes`; what follows them.
    fn merge<'a>(&mut self, mut bytes: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            Self::Fast(sums) => {
                for sum in sums {
                    let (head, rest) = bytes.split_first_chunk::<8>()?;
                    *sum += f64::from_le_bytes(*head);
                    bytes = rest;
                }
            }
            Self::Exact(sums) => {
                for sum in sums {
                    let (head, rest) = bytes.split_at_checked(ExactSum::BYTES)?;
                    sum.merge(&ExactSum::from_bytes(head).ok()?);
                    bytes = rest;
                }
            }
        }
        Some(bytes)
    }

    fn values(&self) -> Vec<f64> {
        match self {
            Self::Fast(sums) => sums.clone(),
            Self::Exact(sums) => sums.iter().map(ExactSum::value).collect(),
        }
    }
}

impl SquareSums for Part {
    fn add(&mut self, index: usize, values: &[f32]) {
        match self {
            Self::Fast(sums) => {
                if let Some(sum) = sums.get_mut(index) {
                    *sum += values.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>();
                }
            }
            Self::Exact(sums) => {
                if let Some(sum) = sums.get_mut(index) {
                    sum.add_squares(values);
                }
            }
        }
    }
}
