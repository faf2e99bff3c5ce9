//! Bytes of model states and traffic, measured by libtorch's own allocator and by the transport, against the formulas of
//! ZeRO (Rajbhandari et al., section 5 and 7).

use zf_core::config::Accumulate;
use zf_core::layout::DType;
use zf_core::stage::CommBytes;
use zf_sys::heap::Category;

use crate::lab::Lab;

/// What one rank holds and sends.
struct Seen {
    at_start: [i64; 3],
    after: [i64; 3],
    traffic: CommBytes,
}

const STATES: [Category; 3] = [Category::Parameters, Category::Gradients, Category::Optimizer];

/// Builds engines, takes two steps of `accumulation` micro-batches, and looks at each rank with nothing in flight.
fn look(dtype: DType, accumulate: Accumulate, ranks: usize, stage: u8, accumulation: usize) -> (Lab, Vec<Seen>) {
    let lab = Lab::tiny("tiny-llama").on(ranks, stage).with(|lab| {
        lab.options.dtype = dtype;
        lab.options.accumulate = accumulate;
        lab.options.exact = false;
        (lab.global, lab.micro) = (ranks * accumulation, 1);
    });
    let seen = lab.run(|mut bench| {
        let held = |bench: &crate::lab::Bench<'_>| STATES.map(|category| bench.heap.stats().live[category]);
        let at_start = held(&bench);
        let mut traffic_after_a_step = || -> zf_core::Result<CommBytes> {
            bench.step()?;
            // Waits for the parameters in flight, which count when they arrive.
            let _ = bench.engine.parameter("model.norm.weight")?;
            Ok(bench.engine.comm_bytes())
        };
        let before = traffic_after_a_step()?;
        let now = traffic_after_a_step()?;
        let traffic = now.since(&before);
        Ok(Seen { at_start, after: held(&bench), traffic })
    });
    (lab.clone(), seen.unwrap_or_else(|error| panic!("{error}")))
}

/// Elements with padding, which is at most 16 a rank and unit.
fn padded(lab: &Lab) -> i64 {
    let layouts = lab.run(|bench| Ok(bench.engine.layout())).expect("builds");
    let total: usize = layouts[0].flats.iter().map(|flat| flat.numel).sum();
    let padding = total - layouts[0].parameters();
    assert!(padding < 16 * lab.ranks * layouts[0].flats.len(), "{padding} elements of padding");
    i64::try_from(total).expect("small")
}

/// Bytes a parameter of parameters, gradients and optimizer states (with masters) under stage 0; the last is divided by
/// the number of ranks under stage 1.
fn check(dtype: DType, accumulate: Accumulate, [params, grads, optim]: [i64; 3]) {
    for ranks in 1..=4 {
        for stage in [0, 1] {
            let (lab, seen) = look(dtype, accumulate, ranks, stage, 2);
            let psi = padded(&lab);
            let share = if stage == 1 { i64::try_from(ranks).expect("small") } else { 1 };
            // One rank keeps gradients where autograd makes them, and gives them back after the update.
            let grads = if ranks == 1 { 0 } else { grads };
            let expected = [params * psi, grads * psi, optim * psi / share];
            for (rank, seen) in seen.iter().enumerate() {
                let case = format!("{dtype:?} {accumulate:?} N={ranks} stage {stage} rank {rank}");
                assert_eq!(seen.at_start, expected, "{case}: at the start");
                assert_eq!(seen.after, expected, "{case}: after two steps");
            }
        }
    }
}

/// 6 + 12/N bytes a parameter (18 under stage 0).
#[test]
fn sixteen_bits_with_float32_gradients() {
    check(DType::Bfloat16, Accumulate::Float32, [2, 4, 12]);
    check(DType::Float16, Accumulate::Float32, [2, 4, 12]);
}

/// 4 + 12/N bytes a parameter (16 under stage 0).
#[test]
fn sixteen_bits_with_their_own_gradients() {
    check(DType::Bfloat16, Accumulate::Model, [2, 2, 12]);
}

/// 8 + 8/N bytes a parameter (16 under stage 0): the parameter is its own master.
#[test]
fn float32() {
    check(DType::Float32, Accumulate::Float32, [4, 4, 8]);
}

/// 2 Psi (N-1)/N elements a step: an all-reduce under stage 0; a reduce-scatter and an all-gather under stage 1. None
/// depends on the number of micro-batches.
#[test]
fn traffic_of_a_step() {
    for (dtype, accumulate, grad) in [
        (DType::Float32, Accumulate::Float32, 4),
        (DType::Bfloat16, Accumulate::Float32, 4),
        (DType::Bfloat16, Accumulate::Model, 2),
    ] {
        for ranks in 1..=4u64 {
            for accumulation in [1, 3] {
                let world = usize::try_from(ranks).expect("small");
                let case = format!("{dtype:?} {accumulate:?} N={ranks} G={accumulation}");
                let (lab, seen) = look(dtype, accumulate, world, 0, accumulation);
                let ring = padded(&lab).unsigned_abs() * (ranks - 1) / ranks;
                for seen in &seen {
                    let expected = CommBytes { all_reduce: 2 * ring * grad, control: seen.traffic.control, ..zero() };
                    assert_eq!(seen.traffic, expected, "{case}: stage 0");
                }
                let (_, seen) = look(dtype, accumulate, world, 1, accumulation);
                for seen in &seen {
                    let expected = CommBytes {
                        reduce_scatter: ring * grad,
                        all_gather: ring * dtype.size() as u64,
                        control: seen.traffic.control,
                        ..zero()
                    };
                    assert_eq!(seen.traffic, expected, "{case}: stage 1");
                    assert!(seen.traffic.control < 2000 * ranks, "{case}: the agreed message is small");
                }
            }
        }
    }
}

/// In exact mode each micro-batch is reduced by itself: the reduce-scatter grows with their number, in the model's type.
#[test]
fn traffic_of_an_exact_step() {
    for accumulation in [1, 3] {
        let lab = Lab::tiny("tiny-llama").on(2, 1).with(|lab| {
            lab.options.dtype = DType::Bfloat16;
            (lab.global, lab.micro) = (2 * accumulation, 1);
        });
        let half = padded(&lab).unsigned_abs() / 2;
        let seen = lab.run(|mut bench| {
            bench.step()?;
            let _ = bench.engine.parameter("model.norm.weight")?;
            Ok(bench.engine.comm_bytes())
        });
        for bytes in seen.expect("runs") {
            assert_eq!(bytes.reduce_scatter, 2 * half * accumulation as u64);
            assert_eq!(bytes.all_gather, 2 * half);
            assert_eq!(bytes.all_reduce, 0);
        }
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

fn zero() -> CommBytes {
    CommBytes::default()
}
