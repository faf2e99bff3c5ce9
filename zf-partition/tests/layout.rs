//! What holds for every layout of the partitioner `zero`.

mod common;

use std::collections::BTreeSet;

use common::{layout, units};
use proptest::prelude::*;
use zf_core::layout::{DType, Placement};
use zf_core::mesh::Mesh;
use zf_core::model::{Init, ParamSpec, UnitSpec};
use zf_core::stage::{Needs, Partitioner};
use zf_partition::{ByteSize, Scope, Scopes, ZeroConfig};

/// Every element is owned by exactly one member of each group.
fn check_placement(placement: &Placement, numel: usize, group: usize) {
    assert_eq!(placement.group(), group);
    let mut owners = vec![0; numel];
    for member in 0..group {
        for element in placement.ranges(member).flatten() {
            owners[element] += 1;
        }
        assert_eq!(placement.len(member), numel / group, "shards are equal");
    }
    assert!(owners.iter().all(|&n| n == 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_element_is_owned_once_and_every_parameter_has_its_place(
        units in units(), ranks in 1usize..9, stage in 0u8..4,
    ) {
        let layout = layout(&ZeroConfig::stage(stage), &units, ranks);
        prop_assert_eq!(layout.units.len(), units.len());
        for flat in &layout.flats {
            for (placement, from) in [(&flat.params, 3), (&flat.grads, 2), (&flat.optim, 1)] {
                check_placement(placement, flat.numel, if stage >= from { ranks } else { 1 });
            }
            prop_assert!(flat.numel.is_multiple_of(16 * ranks));
            prop_assert!(flat.numel - flat.used() < 16 * ranks, "no more padding than needed");
            let mut next = 0;
            for slot in &flat.slots {
                let spec = &units[flat.unit].params[slot.index];
                prop_assert_eq!((&slot.name, &slot.shape), (&spec.name, &spec.shape));
                prop_assert_eq!(&slot.aliases, &spec.aliases);
                prop_assert_eq!((slot.offset, slot.numel), (next, spec.numel()));
                prop_assert_eq!(flat.trainable, spec.trainable, "frozen ones lie apart");
                next += slot.numel;
            }
        }
        let names: BTreeSet<_> = layout.slots().map(|(_, slot)| slot.name.clone()).collect();
        let expected: BTreeSet<_> = units.iter().flat_map(|u| &u.params).map(|p| p.name.clone()).collect();
        prop_assert_eq!(layout.slots().count(), expected.len());
        prop_assert_eq!(names, expected);
    }

    #[test]
    fn pure_and_independent_of_the_bucket(units in units(), ranks in 1usize..9, bucket in 1u64..1_000_000) {
        let first = layout(&ZeroConfig::stage(1), &units, ranks);
        let config = ZeroConfig { bucket: ByteSize(bucket), ..ZeroConfig::stage(1) };
        prop_assert_eq!(config.partitioner().unwrap().transfers(&Mesh::data(ranks).unwrap()).bucket_bytes as u64, bucket);
        prop_assert_eq!(&first, &layout(&config, &units, ranks));
        // The stage changes owners, not places.
        let other = layout(&ZeroConfig::stage(0), &units, ranks);
        for (a, b) in first.flats.iter().zip(&other.flats) {
            prop_assert_eq!((&a.slots, a.numel), (&b.slots, b.numel));
        }
    }
}

fn one(name: &str, shape: &[i64]) -> Vec<UnitSpec> {
    let params = vec![ParamSpec::new(name, shape, Init::Zeros)];
    vec![UnitSpec { name: "unit".into(), params, root: false }]
}

#[test]
fn fewer_elements_than_ranks() {
    let layout = layout(&ZeroConfig::stage(1), &one("scale", &[3]), 8);
    let flat = &layout.flats[0];
    assert_eq!((flat.used(), flat.numel), (3, 128));
    assert!((0..8).all(|rank| flat.optim.len(rank) == 16));
}

#[test]
fn a_buffer_without_elements_has_none_to_own() {
    let layout = layout(&ZeroConfig::stage(1), &one("nothing", &[0, 4]), 4);
    let flat = &layout.flats[0];
    assert_eq!((flat.slots.len(), flat.numel), (1, 0));
    assert!(flat.optim.is_empty());
}

#[test]
fn repeated_names_are_refused() {
    let mut units = one("a", &[2]);
    units.extend(one("a", &[2]));
    let zero = ZeroConfig::stage(0).partitioner().unwrap();
    let message =
        zero.layout(&units, DType::Float32, &Mesh::data(1).unwrap(), Needs::Elements).unwrap_err().to_string();
    assert!(message.contains("parameter `a` appears twice"), "{message}");
}

#[test]
fn stages_are_scopes() {
    let units = one("a", &[7, 5]);
    for (stage, o) in [(0, Scope::Ranks(1)), (1, Scope::World), (1, Scope::Ranks(4))] {
        let scope = Scopes { p: Scope::Ranks(1), g: Scope::Ranks(1), o };
        let config = ZeroConfig { scope: Some(scope), ..ZeroConfig::default() };
        assert_eq!(layout(&config, &units, 4), layout(&ZeroConfig::stage(stage), &units, 4));
    }
    assert_eq!(layout(&ZeroConfig::default(), &units, 4), layout(&ZeroConfig::stage(1), &units, 4));
}

#[test]
fn sizes_that_break_the_rule_are_refused() {
    let ranks = |p, g, o| Scopes { p: Scope::Ranks(p), g: Scope::Ranks(g), o: Scope::Ranks(o) };
    let mesh = Mesh::data(12).unwrap();
    for (scopes, expected) in [
        (ranks(1, 1, 5), "partition.scope.o: each scope must divide the number of data-parallel ranks"),
        (ranks(1, 24, 12), "partition.scope.g: each scope must divide"),
        (ranks(1, 4, 2), "size(o) >= size(g) >= size(p) must hold"),
        (ranks(4, 2, 12), "size(o) >= size(g) >= size(p) must hold"),
        (ranks(1, 4, 6), "size(g) must divide size(o)"),
        (ranks(2, 3, 6), "size(p) size(g)"),
    ] {
        let message = scopes.sizes(&mesh).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert!(message.ends_with("on 12 data-parallel ranks, 12 a node"), "{message}");
    }
    let sizes = Scopes { o: Scope::World, ..ranks(2, 6, 1) }.sizes(&mesh).unwrap();
    assert_eq!((sizes.p, sizes.g, sizes.o), (2, 6, 12));
}
