//! Checkpoints as a whole.

mod damage;
mod lifecycle;
mod round_trip;

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use super::*;

/// One logical float32 tensor: name, kind, shape, values.
pub(super) type Logical = (&'static str, &'static str, Vec<i64>, Vec<f32>);

/// A small model with what makes trouble: no elements, one element, a number that no rank count divides.
pub(super) fn model() -> Vec<Logical> {
    let values = |n: usize, seed: usize| (0..n).map(|i| ((i * 31 + seed) as f32).sin()).collect();
    vec![
        ("w", MASTER, vec![5, 7], values(35, 1)),
        ("w", "exp_avg", vec![5, 7], values(35, 2)),
        ("norm", MASTER, vec![1], vec![-0.0]),
        ("none", MASTER, vec![5, 0], vec![]),
        ("scalar", MASTER, vec![], vec![f32::MIN_POSITIVE / 2.0]),
        ("frozen", PARAMETER, vec![3], vec![1.0, f32::INFINITY, 3.0]),
    ]
}

/// The share of `rank` when every tensor is cut into `world` parts of about equal length.
pub(super) fn share(model: &[Logical], rank: usize, world: usize, step: u64) -> RankState {
    let pieces = model
        .iter()
        .map(|(name, kind, shape, values)| {
            let at = |r: usize| values.len() * r / world;
            piece(name, kind, shape, at(rank)..at(rank + 1), values)
        })
        .collect();
    RankState { step, rank, world, pieces }
}

pub(super) fn piece(name: &str, kind: &str, shape: &[i64], range: Range<usize>, values: &[f32]) -> Piece {
    Piece::f32(name, kind, shape, range.clone(), &values[range])
}

pub(super) fn options(attempt: &str) -> Options {
    Options { keep: 0, attempt: attempt.into(), timeout: Duration::from_secs(20) }
}

pub(super) fn meta(step: u64) -> Meta {
    Meta { step, counts: [("w".to_owned(), step)].into(), ..Meta::default() }
}

/// Writes a checkpoint by `states.len()` ranks, each with a thread and a writer of its own.
pub(super) fn save(root: &Path, options: &Options, states: Vec<RankState>, meta: &Meta) -> crate::Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = states
            .into_iter()
            .map(|state| {
                scope.spawn(move || {
                    let mut writer = Writer::new(root, state.rank, options.clone())?;
                    let meta = (state.rank == 0).then(|| meta.clone());
                    writer.save(state, meta)
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })
}

/// A checkpoint of [`model`] by `world` ranks.
pub(super) fn save_model(root: &Path, world: usize, step: u64) {
    let states = (0..world).map(|rank| share(&model(), rank, world, step)).collect();
    save(root, &options("test"), states, &meta(step)).unwrap();
}

pub(super) fn assert_holds(checkpoint: &Checkpoint, model: &[Logical]) {
    for (name, kind, shape, values) in model {
        let info = checkpoint.tensor(name, kind).unwrap();
        assert_eq!((info.shape, info.numel), (shape.as_slice(), values.len()), "{name} ({kind})");
        let mut found = vec![f32::NAN; values.len()];
        checkpoint.read_f32(name, kind, 0..values.len(), &mut found).unwrap();
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        assert_eq!(bits(&found), bits(values), "{name} ({kind})");
    }
    assert_eq!(checkpoint.tensors().count(), model.len());
}
