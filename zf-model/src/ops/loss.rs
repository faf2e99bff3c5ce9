//! Cross-entropy of a large vocabulary, a chunk of positions at a time.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tch::{Kind, Reduction, Tensor};
use zf_core::model::IGNORE;
use zf_sys::autograd::{CheckpointHooks, checkpoint};

/// Bytes of float32 logits that may be alive at once.
pub const CHUNK_BYTES: usize = 64 << 20;

/// Float32 logits `[.., V]` of hidden states `[.., C]` by the head `weight` `[V, C]`: the product in the type of the
/// inputs, then widened.
///
/// # Errors
/// Shapes that do not fit.
pub fn logits(hidden: &Tensor, weight: &Tensor) -> anyhow::Result<Tensor> {
    Ok(hidden.f_linear(weight, None::<Tensor>)?.f_to_kind(Kind::Float)?)
}

/// Sum of the cross-entropies of all targets that are not [`IGNORE`]: hidden states `[B, T, C]`, head `weight`
/// `[V, C]`, int64 targets `[B, T]`; a float32 scalar.
///
/// Where the logits would take more than [`CHUNK_BYTES`], positions are processed in chunks whose logits are computed
/// again in backward, so that neither pass holds more than one chunk's.
///
/// # Errors
/// Shapes that do not fit, or targets beyond the vocabulary.
pub fn cross_entropy_sum(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> anyhow::Result<Tensor> {
    cross_entropy_sum_within(CHUNK_BYTES, hidden, weight, targets)
}

/// [`cross_entropy_sum`] with another limit in bytes.
///
/// # Errors
/// As for [`cross_entropy_sum`].
pub fn cross_entropy_sum_within(
    limit: usize,
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
) -> anyhow::Result<Tensor> {
    let (vocabulary, width) = weight.size2()?;
    let hidden = hidden.f_reshape([-1, width])?;
    let targets = targets.f_reshape([-1])?;
    let positions = hidden.size2()?.0;
    ensure!(
        targets.size1()? == positions,
        "{} targets for {positions} positions; expected one target a position",
        targets.numel()
    );
    let row = usize::try_from(vocabulary)?.max(1) * Kind::Float.elt_size_in_bytes();
    let chunk = i64::try_from((limit / row).max(1))?;
    if positions <= chunk {
        return chunk_loss(&hidden, weight, &targets);
    }
    // Hidden states and weight are inputs of each chunk, so gradients reach them by themselves; the anchor has nothing
    // to add.
    let anchor = Tensor::f_zeros([1], (Kind::Float, hidden.device()))?;
    let mut sum: Option<Tensor> = None;
    let mut first = 0;
    while first < positions {
        let count = chunk.min(positions - first);
        let inputs = [hidden.f_narrow(0, first, count)?, weight.shallow_clone(), targets.f_narrow(0, first, count)?];
        let outputs = checkpoint(
            &inputs,
            &anchor,
            Arc::new(|inputs: &[Tensor]| {
                let [hidden, weight, targets] = inputs else {
                    return Err(format!("a chunk of the loss takes 3 tensors, got {}", inputs.len()));
                };
                chunk_loss(hidden, weight, targets).map(|loss| vec![loss]).map_err(|error| format!("{error:#}"))
            }),
            CheckpointHooks::default(),
        )?;
        let part = outputs.into_iter().next().context("a chunk of the loss returned no tensor")?;
        sum = Some(match sum {
            None => part,
            Some(sum) => sum.f_add(&part)?,
        });
        first += count;
    }
    sum.context("a loss of no positions")
}

fn chunk_loss(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> anyhow::Result<Tensor> {
    Ok(logits(hidden, weight)?.f_cross_entropy_loss(targets, None::<Tensor>, Reduction::Sum, IGNORE, 0.0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn example(kind: Kind) -> (Tensor, Tensor, Tensor) {
        let values = |shape: [i64; 2], step: f64| {
            let count = shape[0] * shape[1];
            (Tensor::arange(count, (Kind::Float, Device::Cpu)) * step)
                .sin()
                .view(shape)
                .to_kind(kind)
                .set_requires_grad(true)
        };
        let targets = Tensor::arange(28, (Kind::Int64, Device::Cpu)).remainder(9).view([4, 7]);
        let _ = targets.get(1).narrow(0, 2, 3).fill_(IGNORE);
        (values([28, 6], 0.7), values([9, 6], 1.3), targets)
    }

    #[test]
    fn chunks_change_neither_loss_nor_gradients() {
        for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::BFloat16, 2e-2)] {
            let run = |limit: usize| {
                let (hidden, weight, targets) = example(kind);
                let loss = cross_entropy_sum_within(limit, &hidden.view([4, 7, 6]), &weight, &targets).unwrap();
                loss.backward();
                (loss.double_value(&[]), hidden.grad(), weight.grad())
            };
            let whole = run(usize::MAX);
            // One row, five rows (a ragged last chunk), and exactly half.
            for limit in [0, 5 * 9 * 4, 14 * 9 * 4] {
                let parts = run(limit);
                assert!((whole.0 - parts.0).abs() <= 1e-6 * whole.0, "limit {limit}: {} and {}", whole.0, parts.0);
                for (a, b) in [(&whole.1, &parts.1), (&whole.2, &parts.2)] {
                    let scale = a.abs().max().double_value(&[]);
                    let difference = (a - b).abs().max().double_value(&[]);
                    assert!(difference <= tolerance * scale, "limit {limit}: {difference} of {scale}");
                }
            }
        }
    }

    #[test]
    fn ignored_targets_do_not_count() {
        let (hidden, weight, targets) = example(Kind::Float);
        let all = cross_entropy_sum(&hidden, &weight, &targets).unwrap().double_value(&[]);
        let logits = logits(&hidden, &weight).unwrap();
        let kept = targets.view([-1]).ne(IGNORE);
        let by_hand = logits.log_softmax(-1, None).gather(1, &targets.view([-1, 1]).clamp_min(0), false).view([-1]);
        let by_hand = -(by_hand * kept.to_kind(Kind::Float)).sum(Kind::Float).double_value(&[]);
        assert!((all - by_hand).abs() < 1e-4, "{all} and {by_hand}");
    }

    #[test]
    fn without_gradients_nothing_is_kept() {
        let (hidden, weight, targets) = example(Kind::Float);
        let _guard = tch::no_grad_guard();
        let loss = cross_entropy_sum_within(0, &hidden, &weight, &targets).unwrap();
        assert!(!loss.requires_grad());
    }

    #[test]
    fn a_target_beyond_the_vocabulary_is_refused() {
        let (hidden, weight, _) = example(Kind::Float);
        let targets = Tensor::full([28], 9, (Kind::Int64, Device::Cpu));
        assert!(cross_entropy_sum(&hidden, &weight, &targets).is_err());
        let targets = Tensor::zeros([27], (Kind::Int64, Device::Cpu));
        assert!(cross_entropy_sum(&hidden, &weight, &targets).unwrap_err().to_string().contains("27 targets"));
    }
}
