//! Random models and their layouts.

use proptest::prelude::*;
use zf_core::layout::{DType, Layout};
use zf_core::mesh::Mesh;
use zf_core::model::{Init, ParamSpec, UnitSpec};
use zf_core::stage::{Needs, Partitioner};
use zf_partition::ZeroConfig;

/// Shape, whether it is trained, whether it is tied.
type Param = (Vec<i64>, bool, bool);

/// Units of parameters with 0 to 3 dimensions, some of them empty, frozen or tied.
pub(crate) fn units() -> impl Strategy<Value = Vec<UnitSpec>> {
    let param = (prop::collection::vec(0i64..9, 0..4), prop::bool::weighted(0.8), any::<bool>());
    let unit = (prop::collection::vec(param, 0..6), any::<bool>());
    prop::collection::vec(unit, 0..5).prop_map(|units| {
        let unit = |(u, (params, root)): (usize, (Vec<Param>, bool))| UnitSpec {
            name: format!("unit{u}"),
            root,
            params: params
                .into_iter()
                .enumerate()
                .map(|(p, (shape, trainable, tied))| {
                    let name = format!("unit{u}.p{p}");
                    let mut spec = ParamSpec::new(&name, &shape, Init::Zeros);
                    spec.trainable = trainable;
                    if tied { spec.alias(format!("{name}.tied")) } else { spec }
                })
                .collect(),
        };
        units.into_iter().enumerate().map(unit).collect()
    })
}

/// The layout over `ranks` ranks for an update rule that sees elements.
pub(crate) fn layout(config: &ZeroConfig, units: &[UnitSpec], ranks: usize) -> Layout {
    config.partitioner().unwrap().layout(units, DType::Bfloat16, &Mesh::data(ranks).unwrap(), Needs::Elements).unwrap()
}
