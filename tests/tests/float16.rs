//! float16 with a dynamic loss scale, and steps that every rank skips.

use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;
use zf_core::layout::DType;
use zf_core::loss_scale::LossScaleConfig;
use zf_core::model::{Batch, Context, LossSum, Model, UnitSpec};
use zf_optim::CosineConfig;

use crate::lab::{Bench, Lab, adamw, descent, distance};

/// Multiplies the loss of one sequence by `factor` in some steps: only the rank that has the sequence sees it.
struct Poisoned {
    inner: Arc<dyn Model>,
    factor: f64,
    steps: Range<u64>,
    sequence: u64,
}

impl Model for Poisoned {
    fn units(&self) -> Vec<UnitSpec> {
        self.inner.units()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let LossSum { sum } = self.inner.loss(cx, batch)?;
        let hit = self.steps.contains(&cx.noise().step) && batch.sequences.contains(&self.sequence);
        Ok(LossSum { sum: if hit { sum.f_mul_scalar(self.factor)? } else { sum } })
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }
}

fn poison(lab: &Lab, factor: f64, steps: Range<u64>, sequence: u64) -> Lab {
    lab.with(|lab| lab.model = Arc::new(Poisoned { inner: lab.model.clone(), factor, steps, sequence }))
}

fn half(scale: LossScaleConfig) -> Lab {
    Lab::tiny("tiny-llama").with(|lab| {
        lab.options.dtype = DType::Float16;
        lab.options.loss_scale = scale;
    })
}

fn dynamic(initial: f64, window: u64) -> LossScaleConfig {
    LossScaleConfig { initial, window, ..LossScaleConfig::default() }
}

fn fixed(scale: f64) -> LossScaleConfig {
    LossScaleConfig { fixed: Some(scale), ..LossScaleConfig::default() }
}

/// Steps 2 and 3 of six see `factor` on the rank of `sequence`: nobody updates, and nothing but the scale moves.
fn skips(lab: &Lab, factor: f64, sequence: u64, scales: [f64; 6]) {
    let cosine = CosineConfig { warmup: 2, ..CosineConfig::default() };
    let lab = lab.with(|lab| {
        lab.schedule = Arc::new(cosine.schedule().expect("in range"));
        lab.options.total_steps = 6;
        (lab.global, lab.micro) = (2 * lab.ranks, 1);
    });
    let case = format!("{} factor {factor}", lab.case());
    let rates: Vec<f64> = lab.steps(4).0.iter().map(|report| report.lr).collect();
    let by_rank = poison(&lab, factor, 2..4, sequence).run(|mut bench| {
        let state = |bench: &mut Bench<'_>| {
            Ok::<_, zf_core::Error>((bench.engine.state_hash()?, bench.engine.updates(), bench.engine.counts()))
        };
        let (mut seen, mut before) = (Vec::new(), state(&mut bench)?);
        for _ in 0..6 {
            let report = bench.step()?;
            let after = state(&mut bench)?;
            assert_eq!(report.skipped, before == after, "{case}: step {}", report.step);
            assert_eq!(report.skipped, before.0 == after.0, "{case}: step {}", report.step);
            before = after;
            seen.push(report);
        }
        Ok(seen)
    });
    for seen in by_rank.unwrap_or_else(|error| panic!("{case}: {error}")) {
        let skipped: Vec<bool> = seen.iter().map(|step| step.skipped).collect();
        assert_eq!(skipped, [false, false, true, true, false, false], "{case}");
        assert_eq!(seen.iter().map(|step| step.loss_scale).collect::<Vec<_>>(), scales, "{case}");
        // The schedule counts updates: after the skipped steps it goes on where it stood.
        let updated: Vec<f64> = seen.iter().filter(|step| !step.skipped).map(|step| step.lr).collect();
        assert_eq!(updated, rates, "{case}");
    }
}

#[test]
fn an_infinity_on_one_rank_skips_the_step_on_all() {
    let lab = half(dynamic(1024.0, 1000));
    // The first overflow is tolerated, the second halves.
    let scales = [1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0];
    for (stage, exact, sequence) in [
        (0, true, 3),
        (1, true, 0),
        (2, true, 3),
        (3, true, 0),
        (0, false, 0),
        (1, false, 3),
        (2, false, 0),
        (3, false, 3),
    ] {
        let lab = lab.on(2, stage).with(|lab| lab.options.exact = exact);
        skips(&lab, f64::INFINITY, sequence, scales);
    }
    skips(&lab.on(3, 1), f64::NAN, 2, scales);
    skips(&lab.on(3, 3), f64::NAN, 5, scales);
}

#[test]
fn the_other_types_skip_as_well() {
    for dtype in [DType::Float32, DType::Bfloat16] {
        for stage in 0..=3 {
            let exact = (stage % 2 == 0) == (dtype == DType::Float32);
            let lab = Lab::tiny("tiny-llama").on(2, stage).with(|lab| {
                lab.options.dtype = dtype;
                lab.options.exact = exact;
            });
            let (factor, sequence) = if exact { (f64::INFINITY, 3) } else { (f64::NAN, 0) };
            skips(&lab, factor, sequence, [1.0; 6]);
        }
    }
}

#[test]
fn twenty_skipped_steps_end_the_run() {
    for ranks in [1, 2] {
        let lab = poison(&half(dynamic(1024.0, 1000)).on(ranks, 1), f64::INFINITY, 1..1000, 0);
        let taken = std::sync::atomic::AtomicU64::new(0);
        let error = lab
            .run(|mut bench| {
                for _ in 0..40 {
                    bench.step()?;
                    if bench.rank == 0 {
                        taken.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    }
                }
                Ok(())
            })
            .expect_err("no update can be made")
            .to_string();
        assert_eq!(taken.into_inner(), 20, "one good step, nineteen skipped ones, and the twentieth ends it");
        assert!(error.contains("20 steps in a row were skipped"), "{error}");
        assert!(error.contains("loss scale 1"), "{error}");
    }
}

#[test]
fn a_good_step_between_forgives_the_skipped_ones() {
    // 19 skipped, one good, 19 skipped: never twenty in a row.
    struct Twice(Poisoned, Poisoned);
    impl Model for Twice {
        fn units(&self) -> Vec<UnitSpec> {
            self.0.units()
        }
        fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
            let second = self.1.steps.contains(&cx.noise().step);
            if second { self.1.loss(cx, batch) } else { self.0.loss(cx, batch) }
        }
        fn vocabulary(&self) -> usize {
            self.0.vocabulary()
        }
    }
    let lab = half(dynamic(1024.0, 1000)).with(|lab| {
        let poisoned = |steps| Poisoned { inner: lab.model.clone(), factor: f64::NAN, steps, sequence: 0 };
        lab.model = Arc::new(Twice(poisoned(0..19), poisoned(20..39)));
        (lab.global, lab.micro) = (1, 1);
    });
    let (reports, _) = lab.steps(40);
    assert_eq!(reports.iter().filter(|report| !report.skipped).map(|r| r.step).collect::<Vec<_>>(), [19, 39]);
}

/// The scale that grows at every step gives the update of a constant one: what backward multiplies by, the update
/// divides by. Plain gradient descent would show any other factor.
#[test]
fn growth_at_every_step_changes_no_update() {
    for stage in [0, 1] {
        let lab = |scale| {
            half(scale).on(2, stage).with(|lab| {
                lab.optimizer = descent(0.05);
                lab.options.clip = 1.0;
            })
        };
        let growing = lab(dynamic(64.0, 1));
        let constant = lab(fixed(512.0));
        let (a, b) = (growing.steps(6).0, constant.steps(6).0);
        assert_eq!(a.iter().map(|r| r.loss_scale).collect::<Vec<_>>(), [64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0]);
        for (a, b) in a.iter().zip(&b) {
            assert!(!a.skipped && !b.skipped);
            assert!((a.grad_norm / b.grad_norm - 1.0).abs() < 1e-2, "norms {} {}", a.grad_norm, b.grad_norm);
            assert!((a.loss - b.loss).abs() < 1e-2, "losses {} {}", a.loss, b.loss);
        }
        let (start, a, b) = (growing.masters(0), growing.masters(6), constant.masters(6));
        let (moved, apart) = (distance(&b, &start), distance(&a, &b));
        assert!(apart < 1e-2 * moved, "updates differ by {apart} of {moved}");
    }
}

/// The scale is exact as long as nothing under- or overflows: in float32 masters, a power of two more leaves no trace.
#[test]
fn the_update_is_that_of_float32_gradients() {
    for exact in [true, false] {
        let of = |dtype| {
            half(dynamic(1024.0, 1000)).on(2, 1).with(|lab| {
                lab.options.dtype = dtype;
                lab.options.exact = exact;
                lab.optimizer = descent(1.0);
            })
        };
        let (half, single) = (of(DType::Float16), of(DType::Float32));
        let start = single.masters(0);
        assert_eq!(start, half.masters(0), "masters start from unrounded weights");
        let (a, b) = (half.masters(1), single.masters(1));
        let (moved, apart) = (distance(&b, &start), distance(&a, &b));
        assert!(apart < 1e-2 * moved, "updates differ by {apart} of {moved}");
        // Too small a scale loses gradients: the check above is able to fail.
        let lost = half.with(|lab| lab.options.loss_scale = fixed(1e-3)).masters(1);
        assert!(distance(&lost, &b) > 1e-2 * moved, "a scale of 1/1000 passes as well");
    }
}

#[test]
fn all_layouts_agree_in_float16() {
    let lab = half(dynamic(256.0, 2)).with(|lab| lab.optimizer = adamw(1e-3, 0.1));
    let lab = poison(&lab, f64::INFINITY, 1..2, 3);
    let base = lab.on(1, 0).steps(4);
    assert_eq!(base.0.iter().filter(|report| report.skipped).count(), 1);
    for (ranks, stage) in [(1, 1), (2, 0), (2, 2), (2, 3), (3, 1), (3, 3)] {
        for bucket in [25_000_000, 5_000] {
            let found = lab.on(ranks, stage).bucket(bucket).steps(4);
            assert_eq!(crate::lab::bits(&found.0), crate::lab::bits(&base.0), "N={ranks} stage {stage}");
            assert_eq!(found.1, base.1, "N={ranks} stage {stage}: state");
        }
    }
}

/// A rounded weight is the nearest float16 of its master, after updates too.
#[test]
fn parameters_are_rounded_masters() {
    half(dynamic(1024.0, 1000))
        .on(2, 1)
        .run(|mut bench| {
            bench.step()?;
            bench.step()?;
            for (name, master) in bench.masters()? {
                let found = bench.engine.parameter(&name)?.to_kind(tch::Kind::Float).view([-1]);
                let rounded: Vec<f32> = master.iter().map(|&v| half::f16::from_f32(v).to_f32()).collect();
                assert!(found == Tensor::from_slice(&rounded), "{name}");
            }
            Ok(())
        })
        .expect("runs");
}

/// Masters start from the weights of the file, not from rounded ones.
#[test]
fn masters_start_unrounded() {
    let lab = half(fixed(1.0)).on(2, 1);
    let masters = lab.masters(0);
    for spec in lab.model.units().into_iter().flat_map(|unit| unit.params) {
        let file: Vec<f32> = Vec::try_from(lab.weights.load(&spec).expect("in the file").view([-1])).expect("float32");
        assert_eq!(crate::lab::of(&masters, &spec.name), file, "{}", spec.name);
    }
}
