use proptest::prelude::*;

use super::formula::{StateBytes, zero_states, zero_traffic};
use super::*;
use crate::layout::{DType, Owner, Placement};
use crate::mesh::Mesh;
use crate::model::{Init, ParamSpec, UnitSpec};
use crate::stage::Reshard;

/// Units of one parameter each, of these sizes; the first is a root unit if asked.
fn units(sizes: &[i64], root: bool) -> Vec<UnitSpec> {
    let unit = |(index, &size): (usize, &i64)| UnitSpec {
        name: format!("unit {index}"),
        params: vec![ParamSpec::new(format!("w{index}"), &[size], Init::Ones)],
        root: root && index == 0,
    };
    sizes.iter().enumerate().map(unit).collect()
}

/// Equal shards that nest over groups of `sizes`: p, g and o.
fn even(units: &[UnitSpec], dtype: DType, ranks: usize, node: usize, sizes: [usize; 3]) -> Layout {
    let mesh = Mesh::data(ranks).and_then(|mesh| mesh.with_node(node)).expect("divides");
    // The first element of what `rank` owns over `size` ranks: a piece of what it owns over each smaller group.
    let start = |numel: usize, size: usize, rank: usize| {
        let levels = sizes.iter().scan(1, |inner, &outer| Some((std::mem::replace(inner, outer), outer)));
        let within = levels.filter(|&(_, outer)| outer <= size);
        within.map(|(inner, outer)| rank % outer / inner * (numel / outer)).sum::<usize>()
    };
    let place = |numel: usize, size: usize| {
        let first = |member| start(numel, size, member);
        let mut owners: Vec<_> =
            (0..size).map(|member| Owner { start: first(member), end: first(member) + numel / size, member }).collect();
        owners.sort_by_key(|owner| (owner.start, owner.end));
        Placement::custom(numel, size, owners)
    };
    Layout::pack(units, dtype, &mesh, ranks, |_, numel| {
        Ok([place(numel, sizes[0])?, place(numel, sizes[1])?, place(numel, sizes[2])?])
    })
    .expect("packs")
}

fn comm(all_reduce: u64, reduce_scatter: u64, all_gather: u64) -> CommBytes {
    CommBytes { all_reduce, reduce_scatter, all_gather, ..CommBytes::default() }
}

fn times(micro_batches: usize) -> PlanOptions {
    PlanOptions { micro_batches, ..PlanOptions::new(2) }
}

/// Ranks 0 and 1 own 6 and 2 elements of G; in O rank 0 has 1 of its 6, rank 2 the other 5, rank 1 and 3 one each.
fn uneven(ranks: usize) -> Layout {
    let owner = |start, end, member| Owner { start, end, member };
    let grads = Placement::custom(8, 2, vec![owner(0, 6, 0), owner(6, 8, 1)]).expect("covers");
    let owners = vec![owner(0, 1, 0), owner(1, 6, 2), owner(6, 7, 1), owner(7, 8, 3)];
    let optim = Placement::custom(8, 4, owners).expect("covers");
    let mesh = Mesh::data(ranks).and_then(|mesh| mesh.with_node(2)).expect("divides");
    Layout::pack(&units(&[8], false), DType::Bfloat16, &mesh, 1, |_, numel| {
        Ok([Placement::replicated(numel), grads.clone(), optim.clone()])
    })
    .expect("packs")
}

#[test]
fn uneven_owners_by_hand() {
    let plan = plan(&uneven(4), &times(3)).expect("nests");
    assert_eq!(plan.summation, Summation::MicroBatch);
    let held: Vec<_> =
        plan.per_rank.iter().map(|r| [r.device.parameters, r.device.gradients, r.device.optimizer]).collect();
    // 2 bytes of all 8; 4 bytes of 6 or 2; 12 bytes (master and two moments) of 1, 1, 5, 1.
    assert_eq!(held, [[16, 24, 12], [16, 8, 12], [16, 24, 60], [16, 8, 12]]);
    assert_eq!(plan.worst().rank, 2);
    // Three times 2 bytes of what is another's in the pair, inside a node; then 4 bytes to the rank that shares the part of
    // G, two further; then 2 bytes of what the other three publish, along the ring 0-1-2-3-0.
    let scattered = [(3 * 2 * 2, 4 * 5), (3 * 2 * 6, 4), (3 * 2 * 2, 4), (3 * 2 * 6, 4)];
    let published = [2 * 7, 2 * 7, 2 * 3, 2 * 7];
    for (rank, ((near, far), publish)) in plan.per_rank.iter().zip(scattered.into_iter().zip(published)) {
        let inside = if rank.rank % 2 == 0 { publish } else { 0 };
        assert_eq!(rank.traffic.inside_node, comm(0, near, inside), "rank {}", rank.rank);
        assert_eq!(rank.traffic.between_nodes, comm(0, far, publish - inside), "rank {}", rank.rank);
        assert_eq!(rank.of_update, comm(0, 0, publish), "rank {}", rank.rank);
    }
}

#[test]
fn in_order_by_hand() {
    // Two replicas of four: O's ranges 0..1, 1..6, 6..7, 7..8 are halved; of 1 element the second half is all.
    let options = PlanOptions { exact: true, ..times(3) };
    let plan = plan(&uneven(8), &options).expect("nests");
    assert_eq!(plan.summation, Summation::InOrder);
    let gradients: Vec<_> = plan.per_rank.iter().map(|rank| rank.device.gradients).collect();
    assert_eq!(gradients, [4, 4, 20, 4, 4, 4, 20, 4], "float32, of the part of O");
    let parts = [0, 0, 2, 0, 1, 1, 3, 1];
    let owned = [1, 1, 5, 1, 1, 1, 5, 1];
    for (rank, (part, own)) in plan.per_rank.iter().zip(parts.into_iter().zip(owned)) {
        let total = rank.traffic.total();
        assert_eq!(total.reduce_scatter, 3 * 2 * (8 - part), "rank {}", rank.rank);
        assert_eq!(total.all_gather, 4 * (own - part) + 2 * (8 - own), "rank {}", rank.rank);
        assert_eq!(rank.of_update, comm(0, 0, 2 * (8 - own)), "what is published");
    }
}

#[test]
fn groups_inside_a_node_by_hand() {
    // MiCS: all three over pairs, the pairs being nodes; 16 elements, bfloat16.
    let units = units(&[16, 32], true);
    let layout = even(&units, DType::Bfloat16, 4, 2, [2, 2, 2]);
    let plan = plan(&layout, &times(2)).expect("valid");
    for rank in &plan.per_rank {
        assert_eq!([rank.device.parameters, rank.device.gradients, rank.device.optimizer], [48, 96, 288]);
        // Gathers: the root once, the other twice a micro-batch, each half of it. Gradients: half of 48, twice.
        let inside = comm(0, 2 * 2 * 24, 2 * 2 * 8 + 2 * 2 * 2 * 16);
        assert_eq!(rank.traffic.inside_node, inside, "rank {}", rank.rank);
        // The own 24 over two replicas: an all-reduce in float32 of twice a half.
        assert_eq!(rank.traffic.between_nodes, comm(2 * 4 * 12, 0, 0), "rank {}", rank.rank);
        assert_eq!(rank.validation, comm(0, 0, 2 * 24));
        assert_eq!(rank.of_update, CommBytes::default());
        // The root and one other are gathered, and their gradients are on their way.
        assert_eq!(rank.device.buffers, 2 * 48 + 2 * 48);
    }
    let once = PlanOptions { reduce_when: ReduceWhen::Boundary, ..times(2) };
    let boundary = super::plan(&layout, &once).expect("valid");
    assert_eq!(boundary.worst().device.gradients, 4 * 48, "full size");
    assert_eq!(boundary.worst().traffic.total().reduce_scatter, 4 * 24);
    assert_eq!(boundary.worst().traffic.total().all_reduce, 2 * 4 * 12);
}

#[test]
fn what_stays_gathered() {
    let layout = even(&units(&[8, 16, 64, 32, 8], true), DType::Bfloat16, 4, 4, [4, 4, 4]);
    let of = |reshard, max_live_units| {
        let transfers = Transfers { reshard, max_live_units, ..Transfers::default() };
        let plan = plan(&layout, &PlanOptions { transfers, ..PlanOptions::new(2) }).expect("valid");
        (plan.worst().device.buffers - 2 * (8 + 64), plan.worst().traffic.total().all_gather)
    };
    // The root of 8 and the largest window: 64; 64 + 32; all of 120.
    let gathers = |elements: u64| elements / 4 * 3 * 2;
    assert_eq!(of(Reshard::Shard, 1), (2 * (8 + 64), gathers(8 + 2 * 120)));
    assert_eq!(of(Reshard::Shard, 2), (2 * (8 + 96), gathers(8 + 2 * 120)));
    assert_eq!(of(Reshard::Shard, 100), (2 * (8 + 120), gathers(8 + 2 * 120)));
    assert_eq!(of(Reshard::Keep, 1), (2 * (8 + 120), gathers(8 + 120)));
    assert_eq!(of(Reshard::Group(4), 1), of(Reshard::Shard, 1), "the groups of the parameters themselves");
    // Pairs keep a copy: half of 120 more, and only half is gathered for backward.
    assert_eq!(of(Reshard::Group(2), 1), (2 * (8 + 64 + 60), gathers(8 + 120) + 2 * 60));
}

#[test]
fn frozen_buffers_hold_and_move_parameters_only() {
    let mut units = units(&[16, 16], false);
    units[1].params[0].trainable = false;
    let last = plan(&even(&units, DType::Bfloat16, 2, 2, [2, 2, 2]), &times(1)).expect("valid");
    let held =
        |plan: &Plan| [plan.worst().device.parameters, plan.worst().device.gradients, plan.worst().device.optimizer];
    assert_eq!(held(&last), [32, 32, 96]);
    assert_eq!(last.worst().traffic.total(), comm(0, 2 * 8, 2 * 2 * 16));
    // Where nothing before it is trained, its backward does not run.
    units.reverse();
    let first = plan(&even(&units, DType::Bfloat16, 2, 2, [2, 2, 2]), &times(1)).expect("valid");
    assert_eq!(held(&first), [32, 32, 96]);
    assert_eq!(first.worst().traffic.total(), comm(0, 2 * 8, 2 * (8 + 2 * 8)));
}

#[test]
fn one_rank_gives_gradients_back() {
    let layout = even(&units(&[10], false), DType::Bfloat16, 1, 1, [1, 1, 1]);
    let plan = plan(&layout, &times(4)).expect("valid");
    let rank = plan.worst();
    assert_eq!((plan.summation, rank.device.gradients, rank.gradients_between_steps), (Summation::Loose, 40, 0));
    assert_eq!(rank.traffic, Traffic::default());
}

#[test]
fn broken_rules_are_named() {
    let broken = |sizes: [usize; 3]| {
        let mesh = Mesh::data(4).expect("ranks");
        let layout = Layout::pack(&units(&[64], false), DType::Float32, &mesh, 1, |_, numel| {
            Ok([
                Placement::even(numel, sizes[0])?,
                Placement::even(numel, sizes[1])?,
                Placement::even(numel, sizes[2])?,
            ])
        });
        plan(&layout.expect("packs"), &times(1)).expect_err("broken").to_string()
    };
    assert!(broken([4, 2, 4]).contains("the buffer of `w0`: size(o) >= size(g) >= size(p) must hold"));
    assert!(broken([1, 1, 8]).contains("found o = 8, g = 1, p = 1 on 4 ranks"));
    let owner = |start, end, member| Owner { start, end, member };
    let crossed = Placement::custom(8, 2, vec![owner(0, 7, 0), owner(7, 8, 1)]).expect("covers");
    let mesh = Mesh::data(2).expect("ranks");
    let layout = Layout::pack(&units(&[8], false), DType::Float32, &mesh, 1, |_, numel| {
        Ok([Placement::replicated(numel), Placement::even(numel, 2)?, crossed.clone()])
    });
    let error = plan(&layout.expect("packs"), &times(1)).expect_err("not nested").to_string();
    assert!(error.contains("rank 0 owns 7 elements of optimizer states, 4 of gradients"), "{error}");
}

/// A world, sizes p | g | o that divide it, and units.
fn cases() -> impl Strategy<Value = ([usize; 4], Vec<i64>, DType, Accumulate)> {
    let sizes =
        (1..4usize, 1..4usize, 1..4usize, 1..4usize).prop_map(|(p, g, o, n)| [p, p * g, p * g * o, p * g * o * n]);
    let dtype = prop_oneof![Just(DType::Float32), Just(DType::Bfloat16)];
    let accumulate = prop_oneof![Just(Accumulate::Float32), Just(Accumulate::Model)];
    (sizes, prop::collection::vec(0..200i64, 1..5), dtype, accumulate)
}

proptest! {
    /// Every state is held once in each replica of its scope.
    #[test]
    fn ranks_hold_everything_once_a_replica((sizes, shapes, dtype, accumulate) in cases()) {
        let [p, g, o, world] = sizes;
        let layout = even(&units(&shapes, false), dtype, world, world, [p, g, o]);
        let plan = plan(&layout, &PlanOptions { accumulate, ..times(2) }).expect("valid");
        let bytes = StateBytes::new(dtype, accumulate, 2);
        let total = |size: u64, group: usize| size * (plan.elements * (world / group)) as u64;
        let held = plan.held().0;
        prop_assert_eq!(held.parameters, total(bytes.parameter, p));
        prop_assert_eq!(held.optimizer, total(bytes.optimizer, o));
        if plan.summation == Summation::MicroBatch {
            prop_assert_eq!(held.gradients, total(bytes.gradient, g));
        }
    }

    /// However owners lie, a ring of k ranks sends k - 1 times its buffer.
    #[test]
    fn rings_send_all_but_one_copy(cuts in prop::collection::vec(0..100usize, 3), micro_batches in 1..4usize) {
        let mut cuts = cuts;
        cuts.sort_unstable();
        let bounds = [0, cuts[0], cuts[1], cuts[2], 100];
        let owners = |order: [usize; 4]| {
            (0..4).map(|k| Owner { start: bounds[k], end: bounds[k + 1], member: order[k] }).collect::<Vec<_>>()
        };
        let placement = Placement::custom(100, 4, owners([2, 0, 3, 1])).expect("covers");
        let mesh = Mesh::data(4).expect("ranks");
        for stage in [1, 2, 3] {
            let place = |from| if stage >= from { placement.clone() } else { Placement::replicated(100) };
            let layout = Layout::pack(&units(&[100], false), DType::Bfloat16, &mesh, 1, |_, _| {
                Ok([place(3), place(2), place(1)])
            });
            let plan = plan(&layout.expect("packs"), &times(micro_batches)).expect("valid");
            let (each, gradient) = if stage == 1 { (1, 4) } else { (micro_batches as u64, 2) };
            let gathers = if stage == 3 { 2 * micro_batches as u64 } else { 1 };
            prop_assert_eq!(plan.moved().total(), comm(0, each * 3 * 100 * gradient, gathers * 3 * 100 * 2));
        }
    }

    /// Each stage holds and moves what the paper's formulas say of the padded model.
    #[test]
    fn stages_follow_the_paper((sizes, shapes, dtype, accumulate) in cases()) {
        let ranks = sizes[3];
        let layout = even(&units(&shapes, false), dtype, ranks, ranks, [1, 1, 1]);
        let bytes = StateBytes::new(dtype, accumulate, 2);
        for stage in STAGES {
            let layout = at_stage(&layout, stage).expect("divides");
            let plan = plan(&layout, &PlanOptions { accumulate, ..times(1) }).expect("valid");
            let psi = plan.elements as f64;
            prop_assert!(plan.elements - plan.parameters < ranks * layout.flats.len().max(1));
            let expected = zero_states(psi, ranks as u64, stage, &bytes);
            for rank in &plan.per_rank {
                prop_assert!((rank.device.parameters as f64 - expected.parameters).abs() < 1e-6 * psi + 1e-9);
                prop_assert!((rank.device.optimizer as f64 - expected.optimizer).abs() < 1e-6 * psi + 1e-9);
                if ranks > 1 {
                    prop_assert!((rank.device.gradients as f64 - expected.gradients).abs() < 1e-6 * psi + 1e-9);
                }
                let moved = rank.traffic.total();
                // Gradients travel in the accumulator's type at the boundary, in the parameter's after a micro-batch.
                let gradient = if stage < 2 { bytes.gradient } else { bytes.parameter };
                let elements = (moved.all_reduce + moved.reduce_scatter) / gradient + moved.all_gather / bytes.parameter;
                let expected = zero_traffic(psi, ranks as u64, stage);
                prop_assert!((elements as f64 - expected).abs() < 1e-6 * psi + 1e-9, "{} {}", elements, expected);
            }
        }
    }
}

/// A thousand ranks are planned in no time: the work is ranks times buffers.
#[test]
fn a_thousand_ranks() {
    let layout = even(&units(&[1 << 24; 200], false), DType::Bfloat16, 1024, 8, [1024, 1024, 1024]);
    let plan = plan(&layout, &times(1)).expect("valid");
    assert_eq!(plan.held().0.optimizer, (12 * 200) << 24);
    // One rank in eight has its successor on another machine.
    let moved = plan.moved();
    assert_eq!(moved.between_nodes.all_gather * 7, moved.inside_node.all_gather);
}
