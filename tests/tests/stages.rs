//! What the stages move: elements by collective against the formulas of ZeRO (Rajbhandari et al., section 7), and the
//! number of collectives against the size of a bucket.

use std::sync::Arc;

use zf_comm::{Counted, Log, Record, wrap};
use zf_core::config::{Accumulate, ReduceWhen};
use zf_core::layout::{DType, Flat, Layout};
use zf_core::stage::CommBytes;

use crate::lab::Lab;

/// Bytes that each rank moves in its second step, with nothing in flight at either end.
fn traffic(lab: &Lab) -> Vec<CommBytes> {
    let moved = lab.run(|mut bench| {
        let name = bench.engine.layout().flats[0].slots[0].name.clone();
        let mut until_a_step = || -> zf_core::Result<CommBytes> {
            assert!(!bench.step()?.skipped);
            // Waits for published parameters, which count when they arrive. Sharded ones are not published.
            if bench.engine.layout().flats[0].params.group() == 1 {
                let _ = bench.engine.parameter(&name)?;
            }
            Ok(bench.engine.comm_bytes())
        };
        let before = until_a_step()?;
        Ok(until_a_step()?.since(&before))
    });
    moved.unwrap_or_else(|error| panic!("{}: {error}", lab.case()))
}

fn layout(lab: &Lab) -> Layout {
    lab.run(|bench| Ok(bench.engine.layout())).expect("builds").remove(0)
}

/// Elements of all buffers with padding, and of those of root units.
fn sizes(layout: &Layout) -> [u64; 2] {
    let sum = |of: &dyn Fn(&&Flat) -> bool| layout.flats.iter().filter(of).map(|flat| flat.numel as u64).sum();
    [sum(&|_| true), sum(&|flat| layout.units[flat.unit].root)]
}

/// The formulas: `times` micro-batches of gradients and parameters in `dtype`, sums in `held` bytes.
fn expected(lab: &Lab, stage: u8, times: u64) -> CommBytes {
    let [psi, roots] = sizes(&layout(lab));
    let n = lab.ranks as u64;
    let ring = |elements: u64| elements * (n - 1) / n;
    let size = lab.options.dtype.size() as u64;
    let held = if lab.options.accumulate == Accumulate::Float32 { 4 } else { size };
    let each = match lab.options.reduce_when {
        ReduceWhen::Auto => stage >= 2,
        ReduceWhen::MicroBatch => true,
        ReduceWhen::Boundary => false,
    };
    let mut bytes = CommBytes::default();
    match (each, stage) {
        (false, 0) => bytes.all_reduce = 2 * ring(psi) * held,
        (false, _) => bytes.reduce_scatter = ring(psi) * held,
        (true, _) => bytes.reduce_scatter = times * ring(psi) * size,
    }
    bytes.all_gather = match stage {
        // The accumulators, where each micro-batch is reduced.
        0 => u64::from(each) * ring(psi) * held,
        1 | 2 => ring(psi) * size,
        // Root units stay from forward to backward.
        _ => times * ring(2 * psi - roots) * size,
    };
    bytes
}

fn tiny(model: &str) -> Lab {
    Lab::tiny(model).with(|lab| lab.options.exact = false)
}

/// 2, 2, 2 and 3 Psi (N-1)/N elements for stages 0 to 3 with one micro-batch: an all-reduce; a reduce-scatter and an
/// all-gather; the same; two all-gathers and a reduce-scatter. Exactly, but for padding.
#[test]
fn elements_of_a_step_are_those_of_the_paper() {
    for ranks in 1..=4 {
        for (stage, whole) in [(0, [2, 0, 0]), (1, [0, 1, 1]), (2, [0, 1, 1]), (3, [0, 1, 2])] {
            let lab = tiny("tiny-llama").on(ranks, stage).with(|lab| lab.global = lab.ranks);
            let layout = layout(&lab);
            let [psi, roots] = sizes(&layout);
            let padding = psi - layout.parameters() as u64;
            assert_eq!(roots, 0, "this model ties nothing");
            assert!(padding < 16 * (ranks * layout.flats.len()) as u64, "{padding} elements of padding");
            let n = ranks as u64;
            for bytes in traffic(&lab) {
                let CommBytes { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, control } = bytes;
                let elements = [all_reduce, reduce_scatter, all_gather].map(|bytes| bytes / 4);
                assert_eq!(elements, whole.map(|times| times * psi * (n - 1) / n), "{}", lab.case());
                assert_eq!([all_to_all, broadcast], [0, 0], "{}", lab.case());
                assert!(control < 2000 * n, "{}: the agreed message is small, found {control} bytes", lab.case());
            }
        }
    }
}

/// With several micro-batches, summed once or each time, in all types; a tied root is gathered once a micro-batch.
#[test]
fn bytes_of_a_step_follow_the_settings() {
    let types = [
        (DType::Float32, Accumulate::Float32),
        (DType::Bfloat16, Accumulate::Float32),
        (DType::Bfloat16, Accumulate::Model),
    ];
    for (model, ranks, types) in
        [("tiny-llama", 2, &types[..]), ("tiny-gpt2", 2, &types[1..2]), ("tiny-llama", 3, &types[1..])]
    {
        for &(dtype, accumulate) in types {
            for when in [ReduceWhen::Auto, ReduceWhen::MicroBatch, ReduceWhen::Boundary] {
                for (stage, times) in [(0, 2), (1, 3), (2, 2), (3, 2)] {
                    let lab = tiny(model).on(ranks, stage).with(|lab| {
                        lab.options.dtype = dtype;
                        lab.options.accumulate = accumulate;
                        lab.options.reduce_when = when;
                        lab.global = times * lab.ranks;
                    });
                    let expected = expected(&lab, stage, times as u64);
                    for bytes in traffic(&lab) {
                        let bytes = CommBytes { control: 0, ..bytes };
                        assert_eq!(bytes, expected, "{model} {dtype:?} {accumulate:?} {when:?} {}", lab.case());
                    }
                }
            }
        }
    }
}

/// Exact mode reduces each micro-batch by itself, in the model's type.
#[test]
fn an_exact_step_reduces_each_micro_batch() {
    for (stage, times) in [(0, 3), (1, 1), (1, 3), (2, 3), (3, 3)] {
        let lab = Lab::tiny("tiny-gpt2").on(2, stage).with(|lab| {
            lab.options.dtype = DType::Bfloat16;
            lab.global = 2 * times;
        });
        let in_order = lab.with(|lab| lab.options.reduce_when = ReduceWhen::MicroBatch);
        let expected = expected(&in_order, stage, times as u64);
        for bytes in traffic(&lab) {
            assert_eq!(CommBytes { control: 0, ..bytes }, expected, "{}", lab.case());
        }
    }
}

/// Two accumulations of one run: the settings trade memory for traffic as they say.
#[test]
fn the_boundary_moves_less() {
    let moved = |when, global| {
        let lab = tiny("tiny-llama").on(2, 2).with(|lab| {
            lab.options.reduce_when = when;
            lab.global = global;
        });
        traffic(&lab)[0].reduce_scatter
    };
    let once = moved(ReduceWhen::Boundary, 2);
    assert_eq!(moved(ReduceWhen::Boundary, 8), once);
    assert_eq!(moved(ReduceWhen::MicroBatch, 8), 4 * once);
}

/// Bytes of the run file's world: every line of `metrics.jsonl` and the summary's totals of every rank.
#[test]
fn a_run_reports_what_the_formulas_say() {
    const STEPS: u64 = 3;
    for stage in 0..=3 {
        let keys = format!(
            "run.steps = {STEPS}\nrun.global_batch = 4\nrun.micro_batch = 2\ntransport.ranks = 2\npartition.stage = {stage}\n"
        );
        let ran = zf_tests::train(&zf_tests::tiny("tiny-llama", &keys));
        let lab = tiny("tiny-llama").on(2, stage).with(|lab| (lab.global, lab.micro) = (4, 2));
        let step = expected(&lab, stage, 1);
        assert_eq!(ran.records.len() as u64, STEPS);
        for record in &ran.records {
            let found = CommBytes { control: 0, ..record.comm_bytes };
            // Updated parameters are on their way when the line is written, and count when they arrive.
            let late = matches!(stage, 1 | 2);
            let all_gather = if late { found.all_gather } else { step.all_gather };
            assert_eq!(found, CommBytes { all_gather, ..step }, "stage {stage}, step {}", record.step);
        }
        for rank in &ran.summary.per_rank {
            let found = CommBytes { control: 0, ..rank.comm_bytes };
            let whole = CommBytes {
                all_reduce: STEPS * step.all_reduce,
                reduce_scatter: STEPS * step.reduce_scatter,
                all_gather: STEPS * step.all_gather,
                ..CommBytes::default()
            };
            assert_eq!(found, whole, "stage {stage}, rank {}", rank.rank);
        }
    }
}

/// What each rank issues in its second step.
fn issued(lab: &Lab) -> Vec<Vec<Record>> {
    let logs: Vec<Log> = (0..lab.ranks).map(|_| Log::default()).collect();
    let counted = logs.clone();
    let lab = lab.with(|lab| {
        lab.wrap = Some(Arc::new(move |fabric| {
            let logs = counted.clone();
            wrap(fabric, move |rank, inner| Box::new(Counted::new(inner, logs[rank].clone())))
        }));
    });
    let taken = lab.run(|mut bench| {
        bench.step()?;
        logs[bench.rank].take();
        bench.step()?;
        Ok(logs[bench.rank].take())
    });
    taken.unwrap_or_else(|error| panic!("{}: {error}", lab.case()))
}

/// As many collectives as buckets: of a buffer of n elements ceil(n / bucket), not one a parameter.
#[test]
fn collectives_are_counted_in_buckets() {
    for (ranks, bucket) in [(2, 25_000_000), (2, 6_000), (3, 10_000), (4, 40_000)] {
        for stage in 0..=3 {
            let lab = tiny("tiny-gpt2").on(ranks, stage).bucket(bucket).with(|lab| lab.global = lab.ranks);
            let layout = layout(&lab);
            let elements = usize::try_from(bucket / 4).expect("small");
            let whole = |flat: &Flat| flat.numel.div_ceil(elements);
            let split = |flat: &Flat| (flat.numel / ranks).div_ceil(elements / ranks);
            let count = |times: &dyn Fn(&Flat) -> usize| layout.flats.iter().map(times).sum::<usize>();
            let gathered = |flat: &Flat| split(flat) * if layout.units[flat.unit].root { 1 } else { 2 };
            let expected = match stage {
                0 => [count(&whole), 0, 0],
                1 | 2 => [0, count(&split), count(&split)],
                _ => [0, count(&split), count(&gathered)],
            };
            for (rank, records) in issued(&lab).into_iter().enumerate() {
                let of = |kind: &str| records.iter().filter(|record| record.kind == kind).count();
                let found = ["all_reduce", "reduce_scatter", "all_gather"].map(of);
                assert_eq!(found, expected, "{}, rank {rank}", lab.case());
                assert_eq!(of("exchange"), 1, "{}, rank {rank}: one agreed message", lab.case());
                assert_eq!(records.len(), found.iter().sum::<usize>() + 1, "{}, rank {rank}", lab.case());
            }
        }
    }
}
