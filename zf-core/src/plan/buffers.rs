//! Memory that a rank needs beside its own states, whatever the size of the model.

use super::{Summation, bytes};
use crate::layout::{Flat, Layout, Unit};
use crate::stage::{Reshard, Transfers};

/// Bytes of gathered parameters at their most: root units, the largest run of consecutive units that are live at once, and
/// the copy that a few ranks keep between forward and backward. `fetched`: all come from host memory, parts of units to be
/// gathered from there.
pub(super) fn gathered(layout: &Layout, transfers: &Transfers, fetched: bool) -> u64 {
    let held = |flat: &Flat| match flat.params.group() {
        1 if fetched => flat.numel,
        1 => 0,
        group if fetched => flat.numel + flat.numel / group,
        _ => flat.numel,
    };
    let flats = |unit: &Unit| unit.flats.iter().map(|&flat| &layout.flats[flat]).collect::<Vec<_>>();
    let whole = |unit: &Unit| flats(unit).into_iter().map(|flat| bytes(held(flat), flat.dtype.size())).sum::<u64>();
    let (roots, others): (Vec<_>, Vec<_>) = layout.units.iter().partition(|unit| unit.root);
    let secondary = match transfers.reshard {
        Reshard::Group(keepers) if keepers > 0 => {
            let sharded = |flat: &&Flat| flat.params.group() > 1 && flat.params.group() != keepers;
            let kept = others.iter().flat_map(|unit| flats(unit)).filter(sharded);
            kept.map(|flat| bytes(flat.numel / keepers, flat.dtype.size())).sum()
        }
        _ => 0,
    };
    let roots: u64 = roots.into_iter().map(whole).sum();
    let others: Vec<u64> = others.into_iter().map(whole).filter(|&bytes| bytes > 0).collect();
    let live = match transfers.reshard {
        Reshard::Keep => others.len(),
        _ => transfers.max_live_units,
    };
    let live = live.clamp(1, others.len().max(1));
    let window = others.windows(live).map(|units| units.iter().sum()).max().unwrap_or(0);
    roots + window + secondary
}

/// Bytes of the largest unit, given those of each trained buffer.
pub(super) fn largest_unit(layout: &Layout, of: impl Fn(&Flat) -> usize) -> u64 {
    let unit = |unit: &Unit| {
        let flats = unit.flats.iter().map(|&flat| &layout.flats[flat]).filter(|flat| flat.trainable);
        flats.map(&of).sum::<usize>() as u64
    };
    layout.units.iter().map(unit).max().unwrap_or(0)
}

/// Bytes of gradients on their way where each micro-batch is reduced by itself: those of root units, which are reduced
/// last, and of the largest other unit.
pub(super) fn scratch(layout: &Layout, summation: Summation) -> u64 {
    if !matches!(summation, Summation::MicroBatch | Summation::InOrder) {
        return 0;
    }
    let of = |unit: &Unit| {
        let flats = unit.flats.iter().map(|&flat| &layout.flats[flat]).filter(|flat| flat.trainable);
        flats.map(|flat| bytes(flat.numel, flat.dtype.size())).sum::<u64>()
    };
    let roots: u64 = layout.units.iter().filter(|unit| unit.root).map(of).sum();
    roots + layout.units.iter().filter(|unit| !unit.root).map(of).max().unwrap_or(0)
}
