//! The same model under other scopes, for comparison.

use crate::Result;
use crate::layout::{Layout, Placement};
use crate::model::UnitSpec;
use crate::stage::OptimizerBase;

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

/// `layout` under a ZeRO stage over all its ranks, in even shards: 0 splits nothing, 1 the optimizer states, 2 also the
/// gradients, 3 also the parameters (Rajbhandari et al., "ZeRO", section 5). Buffers whose size the ranks do not divide are
/// padded further.
///
/// # Errors
/// None for the layout of a partitioner; those of [`Placement::even`].
pub fn at_stage(layout: &Layout, stage: u8) -> Result<Layout> {
    let ranks = layout.mesh.world();
    let mut layout = layout.clone();
    for flat in &mut layout.flats {
        flat.numel = flat.numel.next_multiple_of(ranks);
        let place = |from| match stage >= from && ranks > 1 {
            true => Placement::even(flat.numel, ranks),
            false => Ok(Placement::replicated(flat.numel)),
        };
        (flat.params, flat.grads, flat.optim) = (place(3)?, place(2)?, place(1)?);
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
