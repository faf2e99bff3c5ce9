//! The same model under other scopes, for comparison.

use crate::layout::{Layout, Placement};
use crate::model::UnitSpec;
use crate::stage::OptimizerBase;
use crate::{Error, Result};

/// The stages of ZeRO.
pub const STAGES: [u8; 4] = [0, 1, 2, 3];

/// Ranks over which parameters, gradients and optimizer states are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Sizes {
    /// Parameters.
    pub p: usize,
    /// Gradients.
    pub g: usize,
    /// Optimizer states.
    pub o: usize,
}

impl Sizes {
    /// The largest of each over the buffers of `layout`.
    pub fn of(layout: &Layout) -> Self {
        let most = |of: fn(&crate::layout::Flat) -> usize| layout.flats.iter().map(of).max().unwrap_or(1);
        Self { p: most(|f| f.params.group()), g: most(|f| f.grads.group()), o: most(|f| f.optim.group()) }
    }
}

/// The scopes of a ZeRO stage on `ranks` ranks: 0 splits nothing, 1 the optimizer states, 2 also the gradients, 3 also the
/// parameters (Rajbhandari et al., "ZeRO", section 5).
pub fn stage_sizes(stage: u8, ranks: usize) -> Sizes {
    let split = |from| if stage >= from { ranks } else { 1 };
    Sizes { p: split(3), g: split(2), o: split(1) }
}

/// `layout` with even shards over groups of `sizes`. Buffers whose size the groups do not divide are padded further.
///
/// # Errors
/// [`Error::Config`]: a size of 0, or one that is no multiple of the next smaller.
pub fn rescope(layout: &Layout, sizes: Sizes) -> Result<Layout> {
    let Sizes { p, g, o } = sizes;
    if p == 0 || g == 0 || !o.is_multiple_of(g) || !g.is_multiple_of(p) {
        return Err(Error::Config(format!("o = {o}, g = {g}, p = {p}: each must be a multiple of the next")));
    }
    let mut layout = layout.clone();
    for flat in &mut layout.flats {
        flat.numel = flat.numel.next_multiple_of(o.max(1));
        let place = |size: usize| match size {
            1 => Ok(Placement::replicated(flat.numel)),
            _ => Placement::even(flat.numel, size),
        };
        (flat.params, flat.grads, flat.optim) = (place(p)?, place(g)?, place(o)?);
    }
    Ok(layout)
}

/// `units` with the parameters frozen that a group of the update rule freezes, as the engine does it.
pub fn with_frozen(mut units: Vec<UnitSpec>, base: &OptimizerBase) -> Vec<UnitSpec> {
    for spec in units.iter_mut().flat_map(|unit| &mut unit.params) {
        let rule = base.groups.iter().find(|rule| rule.matches(&spec.name));
        spec.trainable &= !rule.is_some_and(|rule| rule.frozen);
    }
    units
}
