//! Parameters of every kind, batches of every shape: each layout gives what one rank gives, and one rank gives what plain
//! autograd gives.

use std::sync::Arc;

use tch::Kind;
use zf_core::config::Unused;
use zf_core::data::OrderKind;
use zf_core::layout::DType;
use zf_core::model::{ParamSpec, UnitSpec};
use zf_core::random::RandomWeights;
use zf_core::registry::{DataBundle, ModelBundle};
use zf_core::stage::GroupRule;
use zf_core::train::Silent;
use zf_optim::{AdamWConfig, SgdConfig};

use crate::lab::{
    Lab, Sequences, Toy, WIDTH, adamw, bits, descent, distance, embedding, head, layer, of, run, run_embedding,
    run_head, run_layer, unit, unused, weight,
};
use crate::lifecycle::{StopAfter, newest, resume_from};

/// Takes three steps on every layout in exact mode: the same bits.
fn same_everywhere(lab: &Lab) {
    let base = lab.on(1, 0).steps(3);
    assert!(base.0.iter().all(|report| !report.skipped && report.grad_norm > 0.0), "nothing is trained");
    for (ranks, stage, bucket) in LAYOUTS {
        let lab = lab.on(ranks, stage).bucket(bucket);
        let found = lab.steps(3);
        assert_eq!(bits(&found.0), bits(&base.0), "{}", lab.case());
        assert_eq!(found.1, base.1, "{}: state", lab.case());
    }
}

/// Ranks, stages and bytes of a bucket.
const LAYOUTS: [(usize, u8, u64); 9] = [
    (1, 3, WHOLE),
    (2, 0, SMALL),
    (2, 1, WHOLE),
    (2, 2, SMALL),
    (2, 3, WHOLE),
    (3, 0, WHOLE),
    (3, 1, SMALL),
    (3, 2, WHOLE),
    (3, 3, SMALL),
];
const WHOLE: u64 = 25_000_000;
const SMALL: u64 = 64;

/// A layer with more parameters beside its own, which `extra` may use.
fn with_extras(
    extras: Vec<ParamSpec>,
    extra: impl Fn(&zf_core::model::Params<'_>, &tch::Tensor, &[u64]) -> anyhow::Result<tch::Tensor>
    + Send
    + Sync
    + Clone
    + 'static,
) -> Toy {
    let mut block = layer("block");
    block.params.extend(extras);
    Toy::new(vec![embedding(), block, head()], move |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        let (extra, sequences) = (extra.clone(), batch.sequences.clone());
        let x = run(cx, 1, &x, move |p, x| {
            let x = x + x.f_linear(p.at(0)?, Some(p.at(1)?))?.f_tanh()?;
            extra(p, &x, &sequences)
        })?;
        run_head(cx, 2, &x)
    })
}

#[test]
fn the_plain_model() {
    let lab = Lab::of(Toy::plain());
    same_everywhere(&lab);
    let norm = lab.on(3, 1).steps(1).0[0].grad_norm;
    assert!((norm / lab.dense_norm() - 1.0).abs() < 1e-5, "norm {norm}, plain autograd {}", lab.dense_norm());
}

#[test]
fn parameters_without_elements() {
    let extras = || vec![weight("z.0", &[0]), weight("z.0x5", &[0, 5]), weight("z.5x0", &[5, 0])];
    // Used, so that they get empty gradients.
    let used = with_extras(extras(), |p, x, _| {
        let nothing = p.get("z.0")?.f_sum(Kind::Float)? + p.get("z.0x5")?.f_sum(Kind::Float)?;
        Ok((x + nothing + p.get("z.5x0")?.f_sum(Kind::Float)?).f_contiguous()?)
    });
    same_everywhere(&Lab::of(used));
    // Never used.
    let idle = with_extras(extras(), |_, x, _| Ok(x.shallow_clone()));
    same_everywhere(&Lab::of(idle));
    // Alone in their unit.
    let mut units = Toy::plain().units;
    units.insert(2, unit("empty", extras()));
    let alone = Toy::new(units, |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        let x = run_layer(cx, 1, &x)?;
        let x = run(cx, 2, &x, |_, x| Ok(x.shallow_clone()))?;
        run_head(cx, 3, &x)
    });
    same_everywhere(&Lab::of(alone));
}

#[test]
fn parameters_smaller_than_the_world() {
    let extras = vec![weight("one", &[1]), weight("scalar", &[]), weight("two", &[2])];
    let toy = with_extras(extras, |p, x, _| {
        let factor = p.get("one")? + p.get("scalar")? + p.get("two")?.f_sum(Kind::Float)?;
        Ok((x * factor).f_contiguous()?)
    });
    same_everywhere(&Lab::of(toy));
    // A unit of a single element, on more ranks than elements.
    let mut units = Toy::plain().units;
    units.insert(1, unit("gain", vec![weight("gain", &[1])]));
    let toy = Toy::new(units, |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        let x = run(cx, 1, &x, |p, x| Ok(x * p.at(0)?))?;
        let x = run_layer(cx, 2, &x)?;
        run_head(cx, 3, &x)
    });
    same_everywhere(&Lab::of(toy));
}

/// A bucket of 4 bytes holds one element, less than one for each rank.
#[test]
fn parameters_larger_than_a_bucket() {
    let base = Lab::of(Toy::plain()).steps(2);
    for (ranks, bucket) in [(1, 1), (2, 4), (3, 4), (3, 24), (2, 100)] {
        for stage in 0..=3 {
            for exact in [true, false] {
                let lab = Lab::of(Toy::plain()).on(ranks, stage).bucket(bucket);
                let lab = lab.with(|lab| lab.options.exact = exact);
                let found = lab.steps(2);
                if exact {
                    assert_eq!(found.1, base.1, "N={ranks} stage {stage} bucket {bucket}");
                } else {
                    let apart = (found.0[1].loss - base.0[1].loss).abs();
                    assert!(apart < 1e-6, "N={ranks} stage {stage} bucket {bucket}: losses differ by {apart}");
                }
            }
        }
    }
}

#[test]
fn padding_counts_nowhere() {
    for ranks in 1..=3 {
        let lab = Lab::of(Toy::plain()).on(ranks, 1);
        let layouts = lab.run(|bench| Ok(bench.engine.layout())).expect("builds");
        let layout = &layouts[0];
        assert!(layout.flats.iter().all(|flat| flat.numel % (16 * ranks) == 0 && flat.numel >= flat.used()));
        assert!(layout.flats.iter().any(|flat| flat.numel > flat.used()), "nothing is padded");
        assert_eq!(layout.parameters(), lab.masters(0).iter().map(|(_, values)| values.len()).sum::<usize>());
        assert!(layouts.iter().all(|other| other == layout), "ranks have different layouts");
    }
}

fn frozen(mut specs: UnitSpec) -> UnitSpec {
    specs.params.iter_mut().for_each(|spec| spec.trainable = false);
    specs
}

fn group(pattern: &str) -> GroupRule {
    GroupRule { pattern: pattern.into(), ..GroupRule::default() }
}

/// Checks that exactly the parameters that `stays` names keep their values.
fn moves(lab: &Lab, stays: impl Fn(&str) -> bool) {
    same_everywhere(lab);
    let lab = lab.on(2, 3);
    let (before, after) = (lab.masters(0), lab.masters(2));
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(before == after, stays(name), "{name}");
    }
}

#[test]
fn frozen_parameters_stay() {
    // By the model's own word: one parameter of a unit, the whole first unit, a whole unit between trained ones.
    let mut units = Toy::plain().units;
    units[1].params[1].trainable = false;
    moves(&Lab::of(Toy { units, ..Toy::plain() }), |name| name == "block.bias");
    let mut units = Toy::plain().units;
    units[0] = frozen(embedding());
    moves(&Lab::of(Toy { units, ..Toy::plain() }), |name| name == "embed.weight");
    let mut units = Toy::plain().units;
    units[1] = frozen(layer("block"));
    moves(&Lab::of(Toy { units, ..Toy::plain() }), |name| name.starts_with("block"));
    // By an optimizer group.
    let lab = Lab::of(Toy::plain()).with(|lab| {
        let groups = vec![GroupRule { frozen: true, ..group("head*") }];
        let config = AdamWConfig { lr: 1e-2, weight_decay: 0.1, groups, ..AdamWConfig::default() };
        lab.optimizer = Arc::new(config.rule().expect("in range"));
    });
    moves(&lab, |name| name == "head.weight");
    // 16 bits: a frozen parameter has no master, its values are those of its own type.
    let mut units = Toy::plain().units;
    units[1] = frozen(layer("block"));
    let lab = Lab::of(Toy { units, ..Toy::plain() }).with(|lab| lab.options.dtype = DType::Bfloat16);
    moves(&lab, |name| name.starts_with("block"));
}

#[test]
fn nothing_to_train_is_refused() {
    let units = Toy::plain().units.into_iter().map(frozen).collect();
    let error = Lab::of(Toy { units, ..Toy::plain() }).run(|_| Ok(())).expect_err("all is frozen");
    assert!(error.to_string().contains("every parameter is frozen"), "{error}");
    assert_eq!(error.exit_code(), 2);
}

#[test]
fn parameters_that_no_rank_uses() {
    let lab = || {
        let lab = Lab::of(with_extras(vec![weight("idle", &[3, 4])], |_, x, _| Ok(x.shallow_clone())));
        lab.with(|lab| lab.optimizer = adamw(0.1, 0.5))
    };
    let idle = |lab: &Lab| lab.on(2, 1).masters(2);
    let start = lab().masters(0);
    // Left alone: no decay, no count.
    let skip = unused(&lab(), Unused::Skip);
    same_everywhere(&skip);
    assert_eq!(of(&idle(&skip), "idle"), of(&start, "idle"));
    let counts = |lab: &Lab| {
        let by_rank = lab.on(2, 1).run(|mut bench| {
            bench.step()?;
            Ok((bench.engine.counts()["idle"], bench.engine.counts()["block.weight"]))
        });
        by_rank.expect("runs")
    };
    assert_eq!(counts(&skip), [(0, 1), (0, 1)]);
    // As a dense optimizer would: decay alone.
    let zeros = unused(&lab(), Unused::Zeros);
    same_everywhere(&zeros);
    let decayed: Vec<f32> = of(&start, "idle").iter().map(|v| v * 0.95 * 0.95).collect();
    for (found, expected) in of(&idle(&zeros), "idle").iter().zip(&decayed) {
        assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}");
    }
    assert_eq!(counts(&zeros), [(1, 1), (1, 1)]);
}

/// Sequence 0 is one micro-batch of one rank: the others have no gradient, and none waits for it.
#[test]
fn parameters_that_one_micro_batch_uses() {
    let toy = || {
        with_extras(vec![weight("rare", &[WIDTH])], |p, x, sequences| {
            Ok(if sequences.contains(&0) { x + p.get("rare")? } else { x.shallow_clone() })
        })
    };
    same_everywhere(&Lab::of(toy()));
    // In fast mode it is the first of several micro-batches of one rank, or the only one.
    let norm = Lab::of(toy()).dense_norm();
    for (ranks, global) in [(1, 6), (2, 6), (3, 3)] {
        for stage in 0..=3 {
            let lab = Lab::of(toy()).on(ranks, stage).with(|lab| {
                lab.options.exact = false;
                lab.global = global;
            });
            let found = lab.steps(2).0[0].grad_norm;
            let norm = if global == 6 { norm } else { lab.dense_norm() };
            assert!((found / norm - 1.0).abs() < 1e-5, "N={ranks} stage {stage}: {found}, plain autograd {norm}");
            assert_ne!(of(&lab.masters(1), "rare"), of(&lab.masters(0), "rare"));
        }
    }
}

/// A unit that hands its input on, on one rank alone, does not seem to begin its backward before the unit after it.
#[test]
fn units_that_one_micro_batch_passes_through() {
    let mut units = Toy::plain().units;
    units.insert(2, unit("rare", vec![weight("rare", &[WIDTH]), weight("idle", &[3])]));
    let toy = || {
        Toy::new(units.clone(), |cx, batch| {
            let x = run_embedding(cx, 0, &batch.inputs)?;
            let x = run_layer(cx, 1, &x)?;
            let used = batch.sequences.contains(&1);
            let x = run(cx, 2, &x, move |p, x| Ok(if used { x + p.at(0)? } else { x.shallow_clone() }))?;
            run_head(cx, 3, &x)
        })
    };
    for (prefetch, live) in [(1, 2), (2, 4), (0, 1)] {
        let lab = Lab::of(toy()).with(|lab| (lab.zero.prefetch, lab.zero.max_live_units) = (prefetch, live));
        same_everywhere(&lab);
    }
    // Behind frozen units nothing before it is trained: the other ranks have no gradient to pass on.
    let mut frozen_first = units.clone();
    frozen_first[0] = frozen(embedding());
    frozen_first[1] = frozen(layer("block"));
    same_everywhere(&Lab::of(Toy { units: frozen_first.clone(), ..toy() }));
    // Nothing else is trained at all: most micro-batches have no gradient.
    frozen_first[3] = frozen(head());
    let lab = Lab::of(Toy { units: frozen_first, ..toy() });
    same_everywhere(&lab);
    for stage in 0..=3 {
        let lab = lab.on(2, stage).with(|lab| lab.options.exact = false);
        let (found, plain) = (lab.steps(1).0[0].grad_norm, lab.dense_norm());
        assert!((found / plain - 1.0).abs() < 1e-5, "{}: {found}, plain autograd {plain}", lab.case());
    }
}

/// Used in step 0 alone: what is unused later is not updated by an old gradient.
#[test]
fn parameters_that_are_used_once() {
    for exact in [true, false] {
        let toy = Toy::new(vec![embedding(), layer("block"), head()], |cx, batch| {
            let mut x = run_embedding(cx, 0, &batch.inputs)?;
            let first = cx.noise().step == 0;
            x = run(cx, 1, &x, move |p, x| Ok(if first { x.f_linear(p.at(0)?, Some(p.at(1)?))? } else { x + 1.0 }))?;
            run_head(cx, 2, &x)
        });
        let lab = Lab::of(toy).on(2, 3).with(|lab| lab.options.exact = exact);
        assert_eq!(of(&lab.masters(1), "block.weight"), of(&lab.masters(3), "block.weight"));
        assert_ne!(of(&lab.masters(0), "block.weight"), of(&lab.masters(1), "block.weight"));
    }
}

fn tied() -> Toy {
    let table = weight("embed.weight", &[crate::lab::VOCABULARY, WIDTH]).alias("head.weight");
    let root = UnitSpec { root: true, ..unit("embed", vec![table]) };
    Toy::new(vec![root, layer("block")], |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        let x = run_layer(cx, 1, &x)?;
        run_head(cx, 0, &x)
    })
}

#[test]
fn a_tied_root_is_used_twice() {
    let lab = Lab::of(tied());
    same_everywhere(&lab);
    let dense = lab.dense_norm();
    for (ranks, stage) in [(1, 0), (2, 0), (2, 1), (3, 1), (2, 2), (3, 3)] {
        for exact in [true, false] {
            let lab = lab.on(ranks, stage).with(|lab| lab.options.exact = exact);
            let norm = lab.steps(1).0[0].grad_norm;
            assert!((norm / dense - 1.0).abs() < 1e-5, "N={ranks} stage {stage}: {norm}, plain autograd {dense}");
        }
    }
    let by_alias = lab.on(2, 1).run(|mut bench| {
        let (a, b) = (bench.engine.parameter("embed.weight")?, bench.engine.parameter("head.weight")?);
        Ok(a == b)
    });
    assert_eq!(by_alias.expect("both names are known"), [true, true]);
}

#[test]
fn a_unit_that_runs_twice_must_be_a_root() {
    let twice = Toy::new(Toy::plain().units, |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        let x = run_layer(cx, 1, &x)?;
        let x = run_layer(cx, 1, &x)?;
        run_head(cx, 2, &x)
    });
    let error = Lab::of(twice).on(2, 1).run(|mut bench| bench.step()).expect_err("a unit ran twice").to_string();
    assert!(error.contains("unit `block` twice") && error.contains("root unit"), "{error}");
}

#[test]
fn ranks_that_run_other_units_are_named() {
    for exact in [true, false] {
        let fickle = Toy::new(Toy::plain().units, |cx, batch| {
            let mut x = run_embedding(cx, 0, &batch.inputs)?;
            if std::thread::current().name() == Some("rank-1") {
                cx.skip(1)?;
            } else {
                x = run_layer(cx, 1, &x)?;
            }
            run_head(cx, 2, &x)
        });
        let lab = Lab::of(fickle).on(2, 1).with(|lab| lab.options.exact = exact);
        let error = lab.run(|mut bench| bench.step()).expect_err("ranks differ").to_string();
        assert!(error.contains("rank 1 ran other units than rank 0"), "{error}");
    }
    // Skipped by all: legal, and the unit stays as it is.
    let shorter = Toy::new(Toy::plain().units, |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        cx.skip(1)?;
        run_head(cx, 2, &x)
    });
    moves(&Lab::of(shorter), |name| name.starts_with("block"));
}

#[test]
fn groups_have_their_own_rate_and_decay() {
    // After one step of plain descent the update of each group is that of a run with the group's numbers for all.
    let one_step = |lr: f64, weight_decay: f64, groups: Vec<GroupRule>| {
        let config = SgdConfig { lr, momentum: 0.0, weight_decay, groups };
        let lab = Lab::of(Toy::plain()).on(2, 1);
        lab.with(|lab| lab.optimizer = Arc::new(config.rule().expect("in range"))).masters(1)
    };
    let groups = vec![
        GroupRule { lr: Some(0.5), weight_decay: Some(0.0), ..group("block.weight") },
        GroupRule { weight_decay: Some(0.3), ..group("*.bias") },
        // Too late: the first rule that matches applies.
        GroupRule { lr: Some(0.01), ..group("block.weight") },
        GroupRule { lr: Some(0.02), ..group("embed") },
    ];
    let mixed = one_step(0.1, 0.2, groups.clone());
    let plain = one_step(0.1, 0.2, vec![]);
    assert_eq!(of(&mixed, "head.weight"), of(&plain, "head.weight"), "no group");
    assert_eq!(of(&mixed, "block.weight"), of(&one_step(0.5, 0.0, vec![]), "block.weight"));
    assert_eq!(of(&mixed, "embed.weight"), of(&one_step(0.02, 0.2, vec![]), "embed.weight"));
    // One-dimensional parameters decay only where a group says so.
    assert_eq!(of(&plain, "block.bias"), of(&one_step(0.1, 0.9, vec![]), "block.bias"));
    assert_ne!(of(&mixed, "block.bias"), of(&plain, "block.bias"));
    let lab = Lab::of(Toy::plain()).with(|lab| {
        let config = AdamWConfig { lr: 1e-2, weight_decay: 0.1, groups, ..AdamWConfig::default() };
        lab.optimizer = Arc::new(config.rule().expect("in range"));
    });
    same_everywhere(&lab);
}

#[test]
fn a_group_that_matches_nothing_is_refused() {
    let lab = Lab::of(Toy::plain()).with(|lab| {
        let config = AdamWConfig { groups: vec![group("lm_head")], ..AdamWConfig::default() };
        lab.optimizer = Arc::new(config.rule().expect("in range"));
    });
    let error = lab.run(|_| Ok(())).expect_err("no such parameter");
    assert!(error.to_string().contains("matches no parameter"), "{error}");
    assert_eq!(error.exit_code(), 2);
}

/// Sequences with 1 to 8 counting targets, and some without any: the mean is over targets, not over ranks or
/// micro-batches.
#[test]
fn uneven_targets_weigh_by_their_number() {
    let uneven = |exact: bool, ranks: usize, stage: u8| {
        Lab::of(Toy::plain()).on(ranks, stage).with(|lab| {
            lab.dataset = Arc::new(Sequences { counting: |index| (index * 5 % 9) as usize });
            (lab.global, lab.micro) = (4, 1);
            lab.options.exact = exact;
        })
    };
    let base = uneven(true, 1, 0).steps(4);
    assert_eq!(base.0[0].tokens, 5 + 1 + 6, "sequence 0 counts nowhere");
    for (ranks, stage) in [(1, 0), (2, 0), (2, 1), (2, 2), (4, 1), (4, 3)] {
        let found = uneven(true, ranks, stage).steps(4);
        assert_eq!(bits(&found.0), bits(&base.0), "N={ranks} stage {stage}");
        assert_eq!(found.1, base.1, "N={ranks} stage {stage}: state");
        let fast = uneven(false, ranks, stage).steps(4).0;
        for (fast, exact) in fast.iter().zip(&base.0) {
            assert!((fast.loss - exact.loss).abs() < 3e-6, "N={ranks} stage {stage}: {} {}", fast.loss, exact.loss);
            assert!((fast.grad_norm / exact.grad_norm - 1.0).abs() < 1e-4, "N={ranks} stage {stage}");
        }
    }
    let dense = uneven(true, 1, 0).dense_norm();
    assert!((base.0[0].grad_norm / dense - 1.0).abs() < 1e-5, "{} {dense}", base.0[0].grad_norm);
}

/// A step in which no target counts changes nothing, and the run goes on.
#[test]
fn a_step_without_targets_is_skipped() {
    for ranks in [1, 2] {
        let lab = Lab::of(Toy::plain()).on(ranks, 1).with(|lab| {
            lab.dataset = Arc::new(Sequences { counting: |index| if index < 4 { 0 } else { 8 } });
            (lab.global, lab.micro) = (4, 2);
        });
        let (reports, _) = lab.steps(2);
        assert_eq!(reports.iter().map(|r| (r.skipped, r.tokens)).collect::<Vec<_>>(), [(true, 0), (false, 32)]);
        assert!(reports[1].loss.is_finite());
    }
}

/// The reported norm is that of the unsharded gradient, before clipping; the update is clipped once.
#[test]
fn the_norm_is_global_and_clipping_happens_once() {
    for (name, lab) in [("plain", Lab::of(Toy::plain())), ("tied", Lab::of(tied()))] {
        let dense = lab.dense_norm();
        let clip = dense / 3.0;
        for ranks in 1..=3 {
            for (stage, exact) in [(0, true), (3, true), (0, false), (1, false), (2, false), (3, false)] {
                let lab = lab.on(ranks, stage).with(|lab| {
                    lab.optimizer = descent(1.0);
                    lab.options.clip = clip;
                    lab.options.exact = exact;
                });
                let case = format!("{name} N={ranks} stage {stage} exact {exact}");
                let found = lab.steps(1).0[0].grad_norm;
                assert!((found / dense - 1.0).abs() < 1e-5, "{case}: norm {found}, plain autograd {dense}");
                let moved = distance(&lab.masters(1), &lab.masters(0));
                assert!((moved / clip - 1.0).abs() < 1e-4, "{case}: moved by {moved}, clipped to {clip}");
            }
        }
    }
}

/// One model with parameters of every kind.
fn all_kinds() -> Toy {
    let mut units = tied().units;
    units[1].params.extend([
        weight("idle", &[3, 3]),
        weight("rare", &[WIDTH]),
        weight("nothing", &[0, 2]),
        weight("scalar", &[]),
        ParamSpec { trainable: false, ..weight("still", &[WIDTH]) },
        ParamSpec { trainable: false, ..weight("still.nothing", &[2, 0]) },
    ]);
    Toy::new(units, |cx, batch| {
        let x = run_embedding(cx, 0, &batch.inputs)?;
        let sequences = batch.sequences.clone();
        let x = run(cx, 1, &x, move |p, x| {
            let x = x.f_linear(p.at(0)?, Some(p.at(1)?))? * p.get("still")? + p.get("scalar")?;
            Ok(if sequences.contains(&2) { x + p.get("rare")? } else { x })
        })?;
        run_head(cx, 0, &x)
    })
}

#[test]
fn all_kinds_at_once() {
    for dtype in [DType::Float32, DType::Bfloat16, DType::Float16] {
        let lab = Lab::of(all_kinds()).with(|lab| {
            lab.options.dtype = dtype;
            lab.options.loss_scale.initial = 64.0;
            lab.options.clip = 0.5;
        });
        same_everywhere(&lab);
    }
}

/// Stopped after two steps on two ranks, resumed on three: the state of a run that never stopped.
#[test]
fn all_kinds_survive_a_checkpoint() {
    for dtype in ["float32", "bfloat16", "float16"] {
        let training = |folder: &std::path::Path, ranks: usize| {
            let keys = format!(
                "run.steps = 5\nrun.global_batch = 6\nrun.micro_batch = 1\nrun.exact = true\nrun.dtype = {dtype:?}\n\
                 transport.ranks = {ranks}\n{}",
                if dtype == "float16" { "run.loss_scale = { initial = 64 }\n" } else { "" }
            );
            let mut training = zf_tests::training(&zf_tests::tiny("tiny-llama", &keys), folder);
            let weights = Arc::new(RandomWeights { seed: 5 });
            training.model = ModelBundle { model: Arc::new(all_kinds()), weights, folder: None };
            training.data = DataBundle { dataset: Arc::new(Sequences::full()), order: OrderKind::Shuffled };
            training
        };
        let (whole, parts) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let expected = training(whole.path(), 1).run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
        let first = training(parts.path(), 2);
        let mut observer = StopAfter { stop: first.stop.clone(), after: 2 };
        assert_eq!(first.run(&mut observer).expect_err("stopped").exit_code(), 130);
        let mut second = training(parts.path(), 3);
        second.resume = Some(resume_from(&newest(parts.path()).expect("of step 2")));
        let found = second.run(&mut Silent).unwrap_or_else(|error| panic!("{dtype}: {error}"));
        assert_eq!(found.state_hash, expected.state_hash, "{dtype}");
    }
}
