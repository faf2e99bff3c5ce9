//! The one message of a step on which all ranks agree: which gradients exist anywhere, the sum of squares, non-finite
//! values, the loss, and that all ranks ran the same units.

use super::core::Core;
use crate::norm::ExactSum;
use crate::{Error, Result};

/// What one rank knows of the step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Message {
    /// One byte a slot of a trainable flat, in layout order: whether a gradient arrived.
    pub(crate) present: Vec<u8>,
    /// Loss sums of this rank's micro-batches, in their order.
    pub(crate) losses: Vec<f64>,
    /// Targets that count in them.
    pub(crate) tokens: u64,
    /// Gradient elements that are infinite or not a number, of those this rank sums.
    pub(crate) nonfinite: u64,
    /// Sum of squares of the gradient elements that this rank sums.
    pub(crate) squares: f64,
    /// The same without rounding, in exact mode.
    pub(crate) exact: Vec<u8>,
    /// Hash of the units run and skipped, in order.
    pub(crate) trail: u64,
    /// Whether this rank was asked to stop.
    pub(crate) stop: bool,
}

/// What all ranks know after the message; the same on each.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Agreement {
    /// By slot of a trainable flat, in layout order: whether any rank had a gradient.
    pub(crate) present: Vec<bool>,
    /// Sum of the losses of the step's target tokens.
    pub(crate) loss: f64,
    /// Target tokens of the step.
    pub(crate) tokens: u64,
    /// Non-finite gradient elements anywhere.
    pub(crate) nonfinite: u64,
    /// Sum of squares of the summed gradient, before unscaling.
    pub(crate) squares: f64,
    /// Whether any rank was asked to stop.
    pub(crate) stop: bool,
}

impl Message {
    /// What this rank has to say of the step.
    pub(crate) fn of(core: &Core, losses: Vec<f64>, tokens: u64, trail: u64, exact: bool) -> Result<Self> {
        let mut message = Self { losses, tokens, trail, ..Self::default() };
        let mut sum = ExactSum::default();
        for (flat, seen) in core.flats.iter().zip(&core.reducing.present).filter(|(flat, _)| flat.spec.trainable) {
            message.present.extend(seen.iter().map(|&seen| u8::from(seen)));
            let grads = flat.grads()?;
            if exact {
                for grad in grads.summed(&flat.spec, &flat.reduction)? {
                    let grad = grad.f_to_kind(tch::Kind::Float)?.f_to_device(tch::Device::Cpu)?;
                    sum.add_squares(zf_sys::storage::slice::<f32>(&grad)?);
                }
            } else {
                let part = grads.square_sum(&flat.spec, &flat.reduction)?;
                message.squares += part.sum;
                message.nonfinite += part.nonfinite;
            }
        }
        if exact {
            message.nonfinite = sum.nonfinite();
            message.exact = sum.to_bytes().to_vec();
        }
        Ok(message)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for count in [self.present.len(), self.losses.len(), self.exact.len()] {
            bytes.extend((count as u64).to_le_bytes());
        }
        for word in [self.tokens, self.nonfinite, self.squares.to_bits(), self.trail, u64::from(self.stop)] {
            bytes.extend(word.to_le_bytes());
        }
        self.losses.iter().for_each(|loss| bytes.extend(loss.to_le_bytes()));
        bytes.extend(&self.present);
        bytes.extend(&self.exact);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut word = || {
            let (head, tail) = rest.split_first_chunk::<8>()?;
            rest = tail;
            Some(u64::from_le_bytes(*head))
        };
        let [present, losses, exact] = [word()?, word()?, word()?].map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let [tokens, nonfinite, squares, trail, stop] = [word()?, word()?, word()?, word()?, word()?];
        if rest.len() != losses.checked_mul(8)?.checked_add(present)?.checked_add(exact)? {
            return None;
        }
        let (head, rest) = rest.split_at(losses * 8);
        let losses = head.as_chunks::<8>().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        let (present, exact) = rest.split_at(present);
        let (present, exact, squares) = (present.to_vec(), exact.to_vec(), f64::from_bits(squares));
        Some(Self { present, losses, tokens, nonfinite, squares, exact, trail, stop: stop != 0 })
    }
}

impl Agreement {
    /// Combines the messages of all ranks, in the order of ranks; losses in the order of micro-batches, of which rank r
    /// has numbers r, r + N, ... if `interleaved`, else a contiguous block.
    pub(crate) fn combine(messages: &[Vec<u8>], interleaved: bool) -> Result<Self> {
        let messages = messages
            .iter()
            .enumerate()
            .map(|(rank, bytes)| {
                Message::from_bytes(bytes)
                    .ok_or_else(|| Error::comm(format!("rank {rank} sent a garbled step message")))
            })
            .collect::<Result<Vec<_>>>()?;
        let first = &messages[0];
        let mut agreed = Self { present: vec![false; first.present.len()], ..Self::default() };
        let mut exact = ExactSum::default();
        for (rank, message) in messages.iter().enumerate() {
            if message.trail != first.trail || message.present.len() != first.present.len() {
                return Err(Error::Engine(format!(
                    "rank {rank} ran other units than rank 0 in this step; all ranks must run or skip the same units in \
                     the same order (a model may skip a unit, but not depending on its rank's data)"
                )));
            }
            agreed.present.iter_mut().zip(&message.present).for_each(|(any, &here)| *any |= here != 0);
            agreed.tokens += message.tokens;
            agreed.nonfinite += message.nonfinite;
            agreed.squares += message.squares;
            agreed.stop |= message.stop;
            if !message.exact.is_empty() {
                exact.merge(&ExactSum::from_bytes(&message.exact)?);
            }
        }
        if !first.exact.is_empty() {
            agreed.squares = exact.value();
        }
        agreed.loss = if interleaved {
            let turns = messages.iter().map(|m| m.losses.len()).max().unwrap_or(0);
            (0..turns).flat_map(|turn| messages.iter().filter_map(move |m| m.losses.get(turn))).sum()
        } else {
            messages.iter().flat_map(|m| &m.losses).sum()
        };
        Ok(agreed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(losses: &[f64], trail: u64) -> Message {
        Message { present: vec![1, 0], losses: losses.to_vec(), tokens: 5, squares: 2.5, trail, ..Message::default() }
    }

    #[test]
    fn bytes_survive_the_wire() {
        let sent = message(&[1.5, f64::NAN], 7).to_bytes();
        assert_eq!(Message::from_bytes(&sent).expect("whole").to_bytes(), sent);
        for cut in 0..sent.len() {
            assert_eq!(Message::from_bytes(&sent[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn losses_add_in_the_order_of_micro_batches() {
        let big = 2f64.powi(53);
        let wire = [message(&[big, 1.0], 0).to_bytes(), message(&[-big, 1.0], 0).to_bytes()];
        assert_eq!(Agreement::combine(&wire, true).expect("equal trails").loss, 2.0);
        assert_eq!(Agreement::combine(&wire, false).expect("equal trails").loss, 1.0);
    }

    #[test]
    fn other_units_on_one_rank_are_named() {
        let wire = [message(&[], 1).to_bytes(), message(&[], 2).to_bytes()];
        let error = Agreement::combine(&wire, true).expect_err("trails differ").to_string();
        assert!(error.contains("rank 1 ran other units"), "{error}");
    }
}
