//! The partitioner is found by name, and each unit has one owner.

use own_partitioner::{Split, WholeUnits};
use zf_core::layout::{DType, Layout, Placement};
use zf_core::mesh::Mesh;
use zf_core::model::{Init, ParamSpec, UnitSpec};
use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_core::stage::{Needs, Partitioner};

/// Units of these sizes, each with a frozen parameter of two elements beside.
fn units(sizes: &[i64]) -> Vec<UnitSpec> {
    let unit = |(u, size): (usize, &i64)| {
        let mut frozen = ParamSpec::new(format!("{u}.frozen"), &[2], Init::Ones);
        frozen.trainable = false;
        let params = vec![ParamSpec::new(format!("{u}.weight"), &[*size], Init::Zeros), frozen];
        UnitSpec { name: format!("layer {u}"), params, root: false }
    };
    sizes.iter().enumerate().map(unit).collect()
}

fn layout(partitioner: &dyn Partitioner, sizes: &[i64], ranks: usize) -> Layout {
    let mesh = Mesh::data(ranks).expect("some ranks");
    partitioner.layout(&units(sizes), DType::Float32, &mesh, Needs::Matrices).expect("any model fits")
}

#[test]
fn the_largest_first_to_the_least_loaded() {
    let layout = layout(&WholeUnits::default(), &[10, 70, 30, 35, 1], 2);
    let owner = |placement: &Placement| {
        assert_eq!((placement.group(), placement.owners().len()), (2, 1));
        placement.owners()[0].member
    };
    let found: Vec<usize> = layout.units.iter().map(|unit| owner(&layout.flats[unit.flats[0]].optim)).collect();
    assert_eq!(found, [1, 0, 1, 1, 0], "72 against 37 + 32 + 12, then the last to the lighter");
    for flat in &layout.flats {
        assert_eq!((&flat.params, &flat.grads), (&flat.optim, &flat.optim), "all of a unit lies with one rank");
        assert_eq!(owner(&flat.optim), found[flat.unit], "frozen ones too");
        assert_eq!(flat.optim.len(found[flat.unit]), flat.numel);
    }
}

#[test]
fn states_alone_can_be_split() {
    let layout = layout(&WholeUnits { split: Split::States }, &[10, 20], 2);
    for flat in &layout.flats {
        let all = Placement::replicated(flat.numel);
        assert_eq!((&flat.params, &flat.grads), (&all, &all));
        assert_eq!(flat.optim.group(), 2);
    }
}

#[test]
fn a_run_file_finds_it_by_name() {
    let build = |text: &str| {
        let table: toml::Table = text.parse().expect("the test's own TOML");
        Registry::global().expect("no duplicates").build::<slots::Partition>(&table, &BuildContext::default())
    };
    let partitioner = build("kind = 'whole-units'").expect("valid");
    assert_eq!(layout(&*partitioner, &[5, 6], 2), layout(&WholeUnits::default(), &[5, 6], 2));
    let error = build("kind = 'whole-units'\nsplit = 'some'").err().expect("unknown").to_string();
    assert!(error.contains("expected one of: all, states"), "{error}");
}
