//! What the engine relies on for every choice of scopes: owners nest, and shards are equal or balanced.

mod common;

use std::ops::Range;

use common::{layout, units};
use proptest::prelude::*;
use proptest::sample::select;
use zf_core::layout::{DType, Flat, Layout, Placement};
use zf_core::mesh::Mesh;
use zf_core::model::{Init, ParamSpec, UnitSpec};
use zf_core::stage::{Needs, Partitioner, Reshard};
use zf_partition::{ByteSize, ReshardAfterForward, Scope, Scopes, ZeroConfig};

/// Ranks, and sizes of P, G and O that each divide the next.
fn sizes() -> impl Strategy<Value = (usize, [usize; 3])> {
    let divisor = |n: usize| select((1..=n).filter(|d| n.is_multiple_of(*d)).collect::<Vec<_>>());
    (1usize..=16)
        .prop_flat_map(move |n| (Just(n), divisor(n)))
        .prop_flat_map(move |(n, o)| (Just((n, o)), divisor(o)))
        .prop_flat_map(move |((n, o), g)| (Just((n, o, g)), divisor(g)))
        .prop_map(|((n, o, g), p)| (n, [p, g, o]))
}

fn scopes([p, g, o]: [usize; 3]) -> ZeroConfig {
    ZeroConfig::scope(Scopes { p: Scope::Ranks(p), g: Scope::Ranks(g), o: Scope::Ranks(o) })
}

fn matrices(config: &ZeroConfig, units: &[UnitSpec], ranks: usize) -> Layout {
    config.partitioner().unwrap().layout(units, DType::Bfloat16, &Mesh::data(ranks).unwrap(), Needs::Matrices).unwrap()
}

fn placements(flat: &Flat) -> [&Placement; 3] {
    [&flat.params, &flat.grads, &flat.optim]
}

/// The owner of each element within a group; panics where there is none or more than one.
fn owners(placement: &Placement, numel: usize) -> Vec<usize> {
    let mut owners = vec![None; numel];
    for member in 0..placement.group() {
        for element in placement.ranges(member).flatten() {
            assert_eq!(owners[element].replace(member), None, "element {element} has two owners");
        }
    }
    owners.into_iter().map(|owner| owner.expect("every element has an owner")).collect()
}

/// Whether what a rank updates lies within what it reduces, and that within what it holds.
fn nested(flat: &Flat, ranks: usize) -> bool {
    let [params, grads, optim] = placements(flat).map(|placement| owners(placement, flat.numel));
    let owns = |owners: &[usize], placement: &Placement, rank, e: usize| owners[e] == placement.member(rank);
    (0..ranks).all(|rank| {
        (0..flat.numel).all(|e| {
            let (p, g) = (owns(&params, &flat.params, rank, e), owns(&grads, &flat.grads, rank, e));
            (!owns(&optim, &flat.optim, rank, e) || g) && (!g || p)
        })
    })
}

/// Elements without padding that the members of a placement own.
fn loads(layout: &Layout, of: fn(&Flat) -> &Placement, group: usize) -> Vec<usize> {
    let mut loads = vec![0; group];
    for flat in layout.flats.iter().filter(|flat| flat.trainable) {
        for (member, load) in loads.iter_mut().enumerate() {
            let used = |r: Range<usize>| r.end.min(flat.used()).saturating_sub(r.start);
            *load += of(flat).ranges(member).map(used).sum::<usize>();
        }
    }
    loads
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn even_shards_nest((ranks, sizes) in sizes(), units in units()) {
        let layout = layout(&scopes(sizes), &units, ranks);
        for flat in &layout.flats {
            prop_assert!(nested(flat, ranks));
            for (placement, size) in placements(flat).into_iter().zip(sizes) {
                prop_assert_eq!(placement.group(), size);
                for member in 0..size {
                    prop_assert_eq!(placement.len(member), flat.numel / size);
                }
                prop_assert!(placement.owners().iter().all(|o| (o.end - o.start).is_multiple_of(16)));
                // One size everywhere is the plain split.
                if flat.numel > 0 && sizes.iter().all(|&s| s == 1 || s == ranks) {
                    prop_assert_eq!(placement, &Placement::even(flat.numel, size).unwrap());
                }
            }
            prop_assert!(flat.numel.is_multiple_of(16 * ranks) && flat.numel - flat.used() < 16 * ranks);
        }
    }

    #[test]
    fn whole_matrices_nest_and_are_balanced((ranks, sizes) in sizes(), units in units()) {
        let layout = matrices(&scopes(sizes), &units, ranks);
        let even = common::layout(&scopes(sizes), &units, ranks);
        let mut largest = 0;
        for (flat, even) in layout.flats.iter().zip(&even.flats) {
            prop_assert!(nested(flat, ranks));
            prop_assert_eq!((&flat.slots, flat.numel), (&even.slots, even.numel), "only owners differ");
            prop_assert!(flat.trainable || flat == even, "frozen ones have no state and are split evenly");
            for placement in placements(flat).into_iter().filter(|_| flat.trainable) {
                let owners = owners(placement, flat.numel);
                for slot in &flat.slots {
                    let mine = &owners[slot.offset..slot.offset + slot.numel];
                    prop_assert!(mine.windows(2).all(|pair| pair[0] == pair[1]), "{} is split", slot.name);
                    largest = largest.max(slot.numel);
                }
                let padding = &owners[flat.used().saturating_sub(1)..];
                prop_assert!(padding.windows(2).all(|pair| pair[0] == pair[1]));
            }
        }
        // Among those that share one member of the level above, no two differ by more than one parameter.
        let mut group = 1;
        for (of, size) in [(|f| &f.params) as fn(&Flat) -> &Placement, |f| &f.grads, |f| &f.optim].into_iter().zip(sizes) {
            let loads = loads(&layout, of, size);
            for first in 0..group {
                let among: Vec<_> = loads[first..].iter().step_by(group).collect();
                prop_assert!(**among.iter().max().unwrap() - **among.iter().min().unwrap() <= largest, "{:?}", loads);
            }
            group = size;
        }
    }

    #[test]
    fn how_tensors_travel_changes_no_owner(
        (ranks, sizes) in sizes(), units in units(), bucket in 1u64..1_000_000, prefetch in 0usize..4, live in 1usize..5,
    ) {
        let plain = scopes(sizes);
        let other = ZeroConfig {
            bucket: ByteSize(bucket),
            prefetch,
            max_live_units: live,
            reshard_after_forward: ReshardAfterForward::Keep,
            ..plain.clone()
        };
        prop_assert_eq!(layout(&plain, &units, ranks), layout(&other, &units, ranks));
        prop_assert_eq!(matrices(&plain, &units, ranks), matrices(&other, &units, ranks));
        let transfers = other.partitioner().unwrap().transfers(&Mesh::data(ranks).unwrap());
        let found = (transfers.bucket_bytes as u64, transfers.prefetch, transfers.max_live_units, transfers.reshard);
        prop_assert_eq!(found, (bucket, prefetch, live, Reshard::Keep));
    }

    #[test]
    fn small_units_stay((ranks, sizes) in sizes(), units in units(), below in 0usize..600) {
        let config = ZeroConfig { persist_below: below, ..scopes(sizes) };
        for layout in [layout, matrices] {
            let (found, split) = (layout(&config, &units, ranks), layout(&scopes(sizes), &units, ranks));
            for (flat, split) in found.flats.iter().zip(&split.flats) {
                let elements: usize = units[flat.unit].params.iter().map(ParamSpec::numel).sum();
                if elements < below {
                    prop_assert_eq!(&flat.params, &Placement::replicated(flat.numel));
                } else {
                    prop_assert_eq!(&flat.params, &split.params);
                }
                prop_assert_eq!((&flat.grads, &flat.optim), (&split.grads, &split.optim));
                prop_assert!(nested(flat, ranks));
            }
        }
    }
}

fn one(shapes: &[&[i64]]) -> Vec<UnitSpec> {
    let params = shapes.iter().enumerate().map(|(i, shape)| ParamSpec::new(format!("p{i}"), shape, Init::Zeros));
    vec![UnitSpec { name: "unit".into(), params: params.collect(), root: false }]
}

fn members(placement: &Placement) -> Vec<(Range<usize>, usize)> {
    placement.owners().iter().map(|o| (o.start..o.end, o.member)).collect()
}

#[test]
fn partial_scopes_in_full() {
    // Two ranks hold the parameters together, four reduce together, eight update together.
    let layout = layout(&scopes([2, 4, 8]), &one(&[&[128]]), 8);
    let flat = &layout.flats[0];
    assert_eq!(members(&flat.params), [(0..64, 0), (64..128, 1)]);
    assert_eq!(members(&flat.grads), [(0..32, 0), (32..64, 2), (64..96, 1), (96..128, 3)]);
    let optim: Vec<usize> = flat.optim.owners().iter().map(|o| o.member).collect();
    assert_eq!(optim, [0, 4, 2, 6, 1, 5, 3, 7]);
}

#[test]
fn whole_matrices_in_full() {
    // Sizes 12, 30, 0, 20, 20 over four: the largest first, the least loaded next.
    let shapes: [&[i64]; 5] = [&[12], &[5, 6], &[0, 7], &[4, 5], &[20]];
    let layout = matrices(&ZeroConfig::stage(1), &one(&shapes), 4);
    let flat = &layout.flats[0];
    assert_eq!(members(&flat.optim), [(0..12, 3), (12..42, 0), (42..62, 1), (62..128, 2)]);
    assert_eq!(flat.grads, Placement::replicated(128));
    // Over two, and then over two within each of these.
    let layout = matrices(&scopes([1, 2, 4]), &one(&shapes), 4);
    let flat = &layout.flats[0];
    assert_eq!(members(&flat.grads), [(0..42, 0), (42..128, 1)]);
    assert_eq!(members(&flat.optim), [(0..12, 2), (12..42, 0), (42..62, 1), (62..128, 3)]);
}

#[test]
fn a_frozen_model_is_split_evenly_whatever_the_rule() {
    let mut units = one(&[&[3, 5], &[40]]);
    units[0].params.iter_mut().for_each(|spec| spec.trainable = false);
    assert_eq!(matrices(&ZeroConfig::stage(3), &units, 4), layout(&ZeroConfig::stage(3), &units, 4));
}

#[test]
fn presets_of_nodes() {
    let mesh = Mesh::data(8).unwrap().with_node(2).unwrap();
    let groups = |p, g, o| {
        let zero = ZeroConfig::scope(Scopes { p, g, o }).partitioner().unwrap();
        let layout = zero.layout(&one(&[&[128]]), DType::Float32, &mesh, Needs::Elements).unwrap();
        placements(&layout.flats[0]).map(Placement::group)
    };
    assert_eq!(groups(Scope::Node, Scope::Node, Scope::Node), [2, 2, 2]);
    assert_eq!(groups(Scope::Node, Scope::World, Scope::World), [2, 8, 8]);
}

#[test]
fn resharding_is_resolved_by_the_mesh() {
    let resharded = |ranks, node, reshard| {
        let mesh = Mesh::data(ranks).unwrap().with_node(node).unwrap();
        let config = ZeroConfig { reshard_after_forward: reshard, ..ZeroConfig::stage(3) };
        let zero = config.partitioner().unwrap();
        let layout = zero.layout(&one(&[&[8]]), DType::Float32, &mesh, Needs::Elements);
        layout.map(|_| zero.transfers(&mesh).reshard).map_err(|error| error.to_string())
    };
    use ReshardAfterForward::{Free, Keep, Node, Ranks};
    for (ranks, node, setting, expected) in [
        (8, 4, Free, Reshard::Shard),
        (8, 4, Keep, Reshard::Keep),
        (8, 4, Node, Reshard::Group(4)),
        (8, 8, Node, Reshard::Shard),
        (8, 1, Node, Reshard::Keep),
        (8, 4, Ranks(2), Reshard::Group(2)),
        (8, 4, Ranks(8), Reshard::Shard),
        (8, 4, Ranks(1), Reshard::Keep),
        (1, 1, Ranks(1), Reshard::Shard),
    ] {
        assert_eq!(resharded(ranks, node, setting), Ok(expected), "{ranks} ranks, {node} a node, {setting:?}");
    }
    let message = resharded(8, 4, Ranks(3)).unwrap_err();
    assert!(message.contains("partition.reshard_after_forward: the ranks that keep one copy"), "{message}");
    assert!(message.ends_with("must divide size(p); found 3 ranks with p = 8"), "{message}");
    assert!(resharded(8, 4, Ranks(16)).is_err());
    // Parameters are split over two, a node has three.
    let mesh = Mesh::data(6).unwrap().with_node(3).unwrap();
    let config = ZeroConfig { reshard_after_forward: Node, ..scopes([2, 2, 2]) };
    let zero = config.partitioner().unwrap();
    let message = zero.layout(&one(&[&[8]]), DType::Float32, &mesh, Needs::Elements).unwrap_err().to_string();
    assert!(message.ends_with("found 3 ranks a node with p = 2"), "{message}");
}
