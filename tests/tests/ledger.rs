//! Bytes of model states, measured by libtorch's own allocator by category, against the formulas of ZeRO (Rajbhandari et
//! al., section 5): exactly, but for the padding of shards.

use zf_core::config::{Accumulate, ReduceWhen};
use zf_core::layout::DType;
use zf_sys::heap::Category;

use crate::lab::{Bench, Lab};

const STATES: [Category; 3] = [Category::Parameters, Category::Gradients, Category::Optimizer];

/// Bytes a parameter of parameters, gradients and optimizer states (with masters), all on one rank.
type Column = [i64; 3];

/// 18 bytes.
const FLOAT32_GRADIENTS: Column = [2, 4, 12];
/// 16 bytes.
const MODEL_GRADIENTS: Column = [2, 2, 12];
/// 16 bytes: the parameter is its own master.
const FLOAT32: Column = [4, 4, 8];

fn tiny(dtype: DType, accumulate: Accumulate, when: ReduceWhen) -> Lab {
    Lab::tiny("tiny-llama").with(|lab| {
        lab.global = 12;
        lab.options.dtype = dtype;
        lab.options.accumulate = accumulate;
        lab.options.reduce_when = when;
        lab.options.loss_scale.initial = 256.0;
        lab.options.exact = false;
    })
}

/// What each rank holds when it is built, and after a step of two micro-batches with nothing in flight.
fn held(lab: &Lab) -> Vec<[Column; 2]> {
    let lab = lab.with(|lab| (lab.global, lab.micro) = (2 * lab.ranks, 1));
    let held = |bench: &Bench<'_>| STATES.map(|category| bench.heap.stats().live[category]);
    let seen = lab.run(|mut bench| {
        let at_start = held(&bench);
        assert!(!bench.step()?.skipped);
        // Waits for the parameters in flight.
        let _ = bench.engine.parameter("model.norm.weight")?;
        Ok([at_start, held(&bench)])
    });
    seen.unwrap_or_else(|error| panic!("{}: {error}", lab.case()))
}

/// Elements with padding, which is less than 16 a rank and buffer.
fn padded(lab: &Lab) -> i64 {
    let layouts = lab.run(|bench| Ok(bench.engine.layout())).expect("builds");
    let total: usize = layouts[0].flats.iter().map(|flat| flat.numel).sum();
    let padding = total - layouts[0].parameters();
    assert!(padding < 16 * lab.ranks * layouts[0].flats.len(), "{padding} elements of padding");
    i64::try_from(total).expect("small")
}

/// Checks all stages on one to four ranks; `gradients` says over how many of N ranks a stage splits them, 0 where
/// nothing is kept between steps.
fn check(lab: &Lab, column: Column, gradients: impl Fn(u8, i64) -> i64) {
    for ranks in 1..=4 {
        let psi = padded(&lab.on(ranks, 3));
        let n = i64::try_from(ranks).expect("small");
        for stage in 0..=3 {
            let lab = lab.on(ranks, stage);
            let over = |from: u8| if stage >= from { n } else { 1 };
            let split = [over(3), gradients(stage, n), over(1)];
            let of = |(bytes, over): (&i64, &i64)| if *over == 0 { 0 } else { bytes * psi / over };
            let expected: Vec<i64> = column.iter().zip(&split).map(of).collect();
            for (rank, [at_start, after]) in held(&lab).into_iter().enumerate() {
                assert_eq!(at_start.to_vec(), expected, "{}, rank {rank}: at the start", lab.case());
                assert_eq!(after.to_vec(), expected, "{}, rank {rank}: after a step", lab.case());
            }
        }
    }
}

/// Split from stage 2 on. One rank keeps gradients where autograd makes them, and gives them back after the update.
fn from_stage_2(stage: u8, ranks: i64) -> i64 {
    match (ranks, stage) {
        (1, _) => 0,
        (_, 0 | 1) => 1,
        _ => ranks,
    }
}

/// 18; 6 + 12/N; 2 + 16/N; 18/N.
#[test]
fn sixteen_bits_with_float32_gradients() {
    for dtype in [DType::Bfloat16, DType::Float16] {
        check(&tiny(dtype, Accumulate::Float32, ReduceWhen::Auto), FLOAT32_GRADIENTS, from_stage_2);
    }
}

/// 16; 4 + 12/N; 2 + 14/N; 16/N.
#[test]
fn sixteen_bits_with_their_own_gradients() {
    check(&tiny(DType::Bfloat16, Accumulate::Model, ReduceWhen::Auto), MODEL_GRADIENTS, from_stage_2);
}

/// 16; 8 + 8/N; 4 + 12/N; 16/N.
#[test]
fn float32() {
    check(&tiny(DType::Float32, Accumulate::Float32, ReduceWhen::Auto), FLOAT32, from_stage_2);
}

/// Gradients that are summed once a step are whole until then, whatever the stage.
#[test]
fn at_the_boundary_gradients_are_whole() {
    let lab = tiny(DType::Bfloat16, Accumulate::Float32, ReduceWhen::Boundary);
    check(&lab, FLOAT32_GRADIENTS, |_, ranks| i64::from(ranks > 1));
}

/// Gradients that are summed after each micro-batch lie with those who update.
#[test]
fn after_each_micro_batch_gradients_lie_with_their_owners() {
    let lab = tiny(DType::Bfloat16, Accumulate::Float32, ReduceWhen::MicroBatch);
    check(&lab, FLOAT32_GRADIENTS, |stage, ranks| if stage == 0 { 1 } else { ranks });
}

/// Sums of 16 bits would depend on how many ranks add at once.
#[test]
fn exact_mode_accumulates_in_float32() {
    let lab = tiny(DType::Bfloat16, Accumulate::Model, ReduceWhen::Auto).with(|lab| lab.options.exact = true);
    let error = lab.on(2, 2).run(|_| Ok(())).expect_err("refused");
    assert!(error.to_string().contains("exact mode accumulates in float32"), "{error}");
    assert_eq!(error.exit_code(), 2);
}

/// What a step needs beside the states is given back with it: buffers for gathering always, those for reducing where
/// nothing is reduced again before the boundary.
#[test]
fn buffers_are_given_back() {
    for stage in 0..=3 {
        let lab = tiny(DType::Float32, Accumulate::Float32, ReduceWhen::Boundary).on(2, stage);
        let buffers = lab.run(|mut bench| {
            bench.step()?;
            let _ = bench.engine.parameter("model.norm.weight")?;
            Ok(bench.heap.stats().live[Category::Buffers])
        });
        assert_eq!(buffers.expect("runs"), [0, 0], "stage {stage}");
    }
}

/// What a run reports in its summary are the same bytes.
#[test]
fn the_summary_shows_the_ledger() {
    let keys = "run.steps = 2\nrun.global_batch = 4\nrun.micro_batch = 2\nrun.dtype = \"bfloat16\"\n\
                transport.ranks = 2\npartition.stage = 1\n";
    let ran = zf_tests::train(&zf_tests::tiny("tiny-llama", keys));
    let psi = ran.summary.parameters;
    assert_eq!(ran.summary.per_rank.len(), 2);
    for rank in &ran.summary.per_rank {
        let memory = &rank.memory;
        let near = |bytes: u64, expected: u64| bytes >= expected && bytes < expected + 16 * 1024;
        assert!(near(memory.parameters, 2 * psi), "2-byte parameters: {} of {psi}", memory.parameters);
        assert!(near(memory.gradients, 4 * psi), "{} {psi}", memory.gradients);
        assert!(near(memory.optimizer, 6 * psi), "{} {psi}", memory.optimizer);
        assert!(memory.device_peak >= 12 * psi, "{} {psi}", memory.device_peak);
    }
}
