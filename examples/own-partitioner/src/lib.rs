//! A partitioner in a crate of one's own: `whole-units`, whole layers to ranks by size.
//!
//! A partitioner decides who owns what and nothing else: settings, one pure function from shapes and mesh to a
//! [`Layout`], and one `register!` line. The engine gathers, reduces, updates, saves and resumes by the layout.

use std::cmp::Reverse;
use std::sync::Arc;

use zf_core::Result;
use zf_core::layout::{DType, Layout, Owner, Placement};
use zf_core::mesh::Mesh;
use zf_core::model::{ParamSpec, UnitSpec};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Needs, Partitioner};

/// Each unit of the model belongs to one rank.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WholeUnits {
    /// What the owner alone holds.
    pub split: Split,
}

/// What is split over the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Parameters, gradients and optimizer states.
    #[default]
    All,
    /// Optimizer states; parameters and gradients are on every rank.
    States,
}

impl Partitioner for WholeUnits {
    /// The largest unit first, each to the rank with the least so far. No parameter is split, so any update rule will do.
    fn layout(&self, units: &[UnitSpec], dtype: DType, mesh: &Mesh, _needs: Needs) -> Result<Layout> {
        let ranks = mesh.size("data");
        let size = |unit: &UnitSpec| unit.params.iter().map(ParamSpec::numel).sum::<usize>();
        let mut order: Vec<usize> = (0..units.len()).collect();
        order.sort_by_key(|&unit| Reverse(size(&units[unit])));
        let (mut load, mut owner) = (vec![0; ranks], vec![0; units.len()]);
        for unit in order {
            owner[unit] = (0..ranks).min_by_key(|&rank| load[rank]).unwrap_or(0);
            load[owner[unit]] += size(&units[unit]);
        }
        let everywhere = |numel| [(); 3].map(|()| Placement::replicated(numel));
        // 16 elements of float32 are a cache line.
        let mut layout = Layout::pack(units, dtype, mesh, 16, |_, numel| Ok(everywhere(numel)))?;
        for flat in &mut layout.flats {
            let owners = vec![Owner { start: 0, end: flat.numel, member: owner[flat.unit] }];
            flat.optim = Placement::custom(flat.numel, ranks, owners)?;
            if self.split == Split::All {
                (flat.params, flat.grads) = (flat.optim.clone(), flat.optim.clone());
            }
        }
        Ok(layout)
    }
}

impl Build<slots::Partition> for WholeUnits {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Partitioner>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(
    slots::Partition,
    "whole-units",
    WholeUnits,
    "whole units of the model to ranks, balanced by size",
    "split = \"all\""
);
