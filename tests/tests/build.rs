//! What building an engine needs, and what is left of one: by the heap, in bytes.

use std::sync::Arc;

use zf_core::layout::{DType, Layout};
use zf_core::random::RandomWeights;
use zf_partition::ReshardAfterForward;
use zf_sys::heap::Category;

use crate::lab::{Lab, Toy, VOCABULARY, bits, run, run_embedding, run_head, unit, weight};

const WIDE: i64 = 48;
const LAYERS: usize = 12;

/// Embedding, many wide layers, head: no unit has more than a tenth of the elements.
fn wide() -> Lab {
    let mut units = vec![unit("embed", vec![weight("embed.weight", &[VOCABULARY, WIDE])])];
    units.extend(
        (0..LAYERS)
            .map(|index| unit(&format!("block{index}"), vec![weight(&format!("block{index}.weight"), &[WIDE, WIDE])])),
    );
    units.push(unit("head", vec![weight("head.weight", &[VOCABULARY, WIDE])]));
    Lab::of(Toy::new(units, |cx, batch| {
        let mut x = run_embedding(cx, 0, &batch.inputs)?;
        for index in 0..LAYERS {
            x = run(cx, index + 1, &x, |p, x| {
                Ok(x.f_linear(&p.at(0)?.f_mul_scalar(0.1)?, None::<&tch::Tensor>)?.f_add(x)?)
            })?;
        }
        run_head(cx, LAYERS + 1, &x)
    }))
    .with(|lab| lab.global = 4)
}

/// Bytes of a layout's largest unit in the model's type, and of its largest parameter in float32.
fn largest(layout: &Layout) -> [i64; 2] {
    let bytes = |unit: &zf_core::layout::Unit| -> usize {
        unit.flats.iter().map(|&flat| layout.flats[flat].numel * layout.flats[flat].dtype.size()).sum()
    };
    let unit = layout.units.iter().map(bytes).max().unwrap_or(0);
    let tensor = layout.slots().map(|(_, slot)| 4 * slot.numel).max().unwrap_or(0);
    [unit, tensor].map(|bytes| i64::try_from(bytes).expect("small"))
}

/// Small messages and what libtorch makes for itself.
const SLACK: i64 = 4096;

/// While an engine is built a rank holds its shard, and one unit or two copies of one tensor: as it is read, and in
/// float32.
#[test]
fn building_never_holds_the_whole_model() {
    for (name, lab) in [("random", wide()), ("folder", Lab::tiny("tiny-llama").with(|lab| lab.global = 4))] {
        for dtype in [DType::Float32, DType::Bfloat16] {
            for ranks in [2, 4] {
                let lab = lab.on(ranks, 3).with(|lab| lab.options.dtype = dtype);
                let built = lab.run(|bench| Ok((bench.engine.layout(), bench.heap.stats())));
                for (layout, stats) in built.unwrap_or_else(|error| panic!("{name} {}: {error}", lab.case())) {
                    let case = format!("{name} {dtype:?} N={ranks}");
                    let [unit, tensor] = largest(&layout);
                    let shard = stats.live.total();
                    assert_eq!(stats.live[Category::Buffers], 0, "{case}: {stats:?}");
                    let beside = stats.peak - shard;
                    assert!(beside <= unit.max(2 * tensor) + SLACK, "{case}: {beside} beside the shard, {stats:?}");
                    let model = i64::try_from(layout.parameters() * dtype.size()).expect("small");
                    assert!(
                        beside < model / 2,
                        "{case}: the bound {unit} {tensor} says nothing of a model of {model} bytes"
                    );
                }
            }
        }
    }
}

/// Loading from a folder gives what a random start with the same values would: each rank its part.
#[test]
fn shards_start_from_the_same_values() {
    let lab = wide();
    let start = lab.on(1, 0).masters(0);
    for (ranks, stage) in [(2, 3), (4, 3), (4, 2)] {
        assert_eq!(lab.on(ranks, stage).masters(0), start, "N={ranks} stage {stage}");
    }
    let other = lab.with(|lab| lab.weights = Arc::new(RandomWeights { seed: 6 }));
    assert_ne!(other.on(2, 3).masters(0), start, "another seed");
}

/// Never more units at once than allowed; after a step none.
#[test]
fn units_come_and_go() {
    let units = LAYERS + 2;
    let base = wide().on(1, 0).with(|lab| lab.global = 2).steps(2);
    for (prefetch, most, reshard, expected) in [
        (0, 1, ReshardAfterForward::Free, 1),
        (0, 4, ReshardAfterForward::Free, 1),
        (1, 1, ReshardAfterForward::Free, 1),
        (1, 2, ReshardAfterForward::Free, 2),
        (3, 2, ReshardAfterForward::Free, 2),
        (3, 4, ReshardAfterForward::Free, 4),
        (1, 2, ReshardAfterForward::Ranks(1), units),
        (1, 2, ReshardAfterForward::Keep, units),
    ] {
        for exact in [true, false] {
            let lab = wide().on(2, 3).with(|lab| {
                (lab.zero.prefetch, lab.zero.max_live_units) = (prefetch, most);
                lab.zero.reshard_after_forward = reshard;
                lab.options.exact = exact;
                lab.global = 2;
            });
            let seen = lab.run(|mut bench| {
                assert_eq!(bench.engine.peak_live_units(), 0, "nothing was gathered yet");
                let mut reports = Vec::new();
                let held = bench.heap.stats().live;
                for _ in 0..2 {
                    reports.push(bench.step()?);
                }
                let now = bench.heap.stats().live;
                assert_eq!(now[Category::Parameters], held[Category::Parameters], "{}", lab.case());
                Ok((reports, bench.engine.peak_live_units()))
            });
            for (reports, peak) in seen.unwrap_or_else(|error| panic!("{}: {error}", lab.case())) {
                assert_eq!(peak, expected, "{}", lab.case());
                assert!(!exact || bits(&reports) == bits(&base.0), "{}", lab.case());
            }
        }
    }
}

/// Gathered parameters never take more than the units that may be live.
#[test]
fn gathered_parameters_stay_within_their_bound() {
    let peak = |prefetch, most| {
        let lab = wide().on(2, 3).with(|lab| {
            (lab.zero.prefetch, lab.zero.max_live_units) = (prefetch, most);
            lab.options.reduce_when = zf_core::config::ReduceWhen::Boundary;
            lab.options.exact = false;
            lab.global = 2;
        });
        let seen = lab.run(|mut bench| {
            let built = bench.heap.stats().live.total();
            bench.heap.reset_peak();
            bench.step()?;
            let after = bench.heap.stats();
            assert_eq!(after.live.total(), built, "{:?}", after.live);
            Ok(after.at_peak[Category::Buffers])
        });
        seen.unwrap_or_else(|error| panic!("{}: {error}", lab.case()))
    };
    let unit = 4 * WIDE * WIDE;
    for (prefetch, most) in [(0, 1), (1, 2), (3, 4)] {
        for bytes in peak(prefetch, most) {
            let most = i64::try_from(most).expect("small");
            assert!(bytes <= most * unit + SLACK, "prefetch {prefetch}: {bytes} bytes of buffers, a unit has {unit}");
        }
    }
}

/// Engines that were built, run and dropped leave nothing behind: no hook keeps them alive.
#[test]
fn fifty_engines_leave_nothing() {
    for (ranks, stage) in [(1, 0), (2, 1), (2, 2), (2, 3)] {
        let lab = Lab::of(Toy::plain()).on(ranks, stage).with(|lab| lab.global = lab.ranks);
        let left = std::sync::Mutex::new(Vec::new());
        for _ in 0..50 {
            let heaps = lab.run(|mut bench| {
                bench.step()?;
                Ok(bench.heap.clone())
            });
            let heaps = heaps.unwrap_or_else(|error| panic!("{}: {error}", lab.case()));
            left.lock().expect("no panic").extend(heaps.into_iter().map(|heap| heap.stats().live.total()));
        }
        let left = left.into_inner().expect("no panic");
        assert_eq!(left.len(), 50 * ranks);
        assert!(left.iter().all(|&bytes| bytes == 0), "{}: {left:?}", lab.case());
    }
}
