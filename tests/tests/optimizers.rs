//! Update rules by what they see, and training that changes in its midst: the same at every stage on any ranks.

use std::sync::Arc;

use zf_core::Result;
use zf_core::config::ReduceWhen;
use zf_core::layout::DType;
use zf_core::loss_scale::LossScaleConfig;
use zf_core::stage::{GroupRule, Needs, Optimizer};
use zf_optim::{AdamWConfig, LambConfig, LionConfig, MuonConfig, SgdConfig};

use crate::lab::{Lab, Toy, bits, descent, distance, embedding, head, layer, of, run_embedding, run_head, run_layer};

/// Every rule of this version, with rates at which a few steps show.
fn rules() -> Vec<(&'static str, Arc<dyn Optimizer>)> {
    const GOOD: &str = "in range";
    let (lr, weight_decay) = (1e-2, 0.1);
    vec![
        ("adamw", Arc::new(AdamWConfig { lr, weight_decay, ..AdamWConfig::default() }.rule().expect(GOOD))),
        ("sgd", Arc::new(SgdConfig { lr, momentum: 0.9, weight_decay, ..SgdConfig::default() }.rule().expect(GOOD))),
        ("lion", Arc::new(LionConfig { lr: 1e-3, weight_decay, ..LionConfig::default() }.rule().expect(GOOD))),
        ("lamb", Arc::new(LambConfig { lr, weight_decay, ..LambConfig::default() }.rule().expect(GOOD))),
        ("muon", Arc::new(MuonConfig { lr, weight_decay, ..MuonConfig::default() }.rule().expect(GOOD))),
    ]
}

/// Ranks and stages, with the bytes of a bucket.
const LAYOUTS: [(usize, u8, u64); 10] = [
    (1, 3, WHOLE),
    (2, 0, WHOLE),
    (2, 1, SMALL),
    (2, 2, WHOLE),
    (2, 3, SMALL),
    (3, 1, WHOLE),
    (3, 3, WHOLE),
    (4, 0, SMALL),
    (4, 2, SMALL),
    (4, 3, WHOLE),
];
const WHOLE: u64 = 25_000_000;
const SMALL: u64 = 100;

fn deep() -> Lab {
    let units = vec![embedding(), layer("a"), layer("b"), layer("c"), head()];
    let toy = Toy::new(units, |cx, batch| {
        let mut x = run_embedding(cx, 0, &batch.inputs)?;
        for unit in 1..=3 {
            x = run_layer(cx, unit, &x)?;
        }
        run_head(cx, 4, &x)
    });
    Lab::of(toy).with(|lab| (lab.global, lab.options.clip) = (12, 0.5))
}

#[test]
fn every_rule_gives_the_same_bits_everywhere() {
    let mut states = Vec::new();
    for (name, rule) in rules() {
        for dtype in [DType::Float32, DType::Bfloat16] {
            let lab = deep().with(|lab| {
                lab.optimizer = rule.clone();
                lab.options.dtype = dtype;
            });
            let base = lab.on(1, 0).steps(3);
            assert!(base.0.iter().all(|report| report.grad_norm > 0.0 && !report.skipped), "{name} {dtype:?}");
            for (ranks, stage, bucket) in LAYOUTS {
                let lab = lab.on(ranks, stage).bucket(bucket);
                let found = lab.steps(3);
                assert_eq!(bits(&found.0), bits(&base.0), "{name} {dtype:?} {}", lab.case());
                assert_eq!(found.1, base.1, "{name} {dtype:?} {}: state", lab.case());
            }
            states.push(base.1);
        }
    }
    states.sort();
    states.dedup();
    assert_eq!(states.len(), 10, "two rules give one state");
}

/// On a real model, whose matrices differ in size.
#[test]
fn rules_that_see_more_than_elements_train_a_llama() {
    for (name, rule) in rules().into_iter().filter(|(_, rule)| rule.needs() != Needs::Elements) {
        let lab = Lab::tiny("tiny-llama").with(|lab| lab.optimizer = rule.clone());
        let base = lab.on(1, 0).steps(2);
        for (ranks, stage) in [(2, 3), (3, 2), (3, 1)] {
            let lab = lab.on(ranks, stage);
            assert_eq!(lab.steps(2).1, base.1, "{name} {}", lab.case());
        }
    }
}

/// In fast mode gradients differ in their last bits. Where one is nearly zero, rules that take signs or quotients make
/// much of it: their updates are compared as a whole.
#[test]
fn fast_mode_differs_by_rounding() {
    for (name, rule) in rules() {
        let lab = deep().with(|lab| lab.optimizer = rule.clone());
        let (start, exact) = (lab.masters(0), lab.on(1, 0).masters(3));
        let moved = distance(&exact, &start);
        for (ranks, stage, bucket) in LAYOUTS {
            for when in [ReduceWhen::MicroBatch, ReduceWhen::Boundary] {
                let lab = lab.on(ranks, stage).bucket(bucket).with(|lab| {
                    lab.options.exact = false;
                    lab.options.reduce_when = when;
                });
                let apart = distance(&lab.masters(3), &exact);
                assert!(apart < 1e-3 * moved, "{name} {when:?} {}: {apart} of {moved}", lab.case());
            }
        }
    }
}

/// No rank that holds a whole matrix holds all of them.
#[test]
fn whole_matrices_are_balanced() {
    let rule = rules().pop().expect("muon").1;
    for ranks in 2..=4 {
        let lab = Lab::tiny("tiny-llama").on(ranks, 3).with(|lab| {
            lab.optimizer = rule.clone();
            lab.global = ranks;
        });
        let layout = lab.run(|bench| Ok(bench.engine.layout())).expect("builds").remove(0);
        let held: Vec<usize> =
            (0..ranks).map(|rank| layout.flats.iter().map(|flat| flat.optim.len(rank)).sum()).collect();
        let largest = layout.slots().map(|(_, slot)| slot.numel).max().expect("slots");
        let (least, most) = (held.iter().min().expect("ranks"), held.iter().max().expect("ranks"));
        assert!(most - least <= largest + 16 * ranks * layout.flats.len(), "{held:?}, the largest has {largest}");
        for (flat, slot) in layout.slots() {
            let owners =
                flat.optim.owners().iter().filter(|o| o.start < slot.offset + slot.numel && slot.offset < o.end);
            assert!(slot.numel == 0 || owners.count() == 1, "{} is split", slot.name);
        }
    }
}

/// The scale grows at every step, and the update knows which one backward used.
#[test]
fn growth_at_every_step_changes_no_update_at_any_stage() {
    let of = |scale: LossScaleConfig| {
        Lab::tiny("tiny-llama").with(|lab| {
            lab.options.dtype = DType::Float16;
            lab.options.loss_scale = scale;
            lab.optimizer = descent(0.05);
        })
    };
    let growing = of(LossScaleConfig { initial: 64.0, window: 1, ..LossScaleConfig::default() });
    let constant = of(LossScaleConfig { fixed: Some(512.0), ..LossScaleConfig::default() }).on(1, 0);
    let (start, expected) = (constant.masters(0), constant.masters(4));
    let moved = distance(&expected, &start);
    let base = growing.on(1, 0).steps(4);
    assert_eq!(base.0.iter().map(|r| r.loss_scale).collect::<Vec<_>>(), [64.0, 128.0, 256.0, 512.0]);
    for (ranks, stage) in [(2, 0), (2, 2), (3, 1), (3, 3)] {
        let lab = growing.on(ranks, stage);
        assert_eq!(lab.steps(4).1, base.1, "{}", lab.case());
        let fast = lab.with(|lab| lab.options.exact = false);
        let apart = distance(&fast.masters(4), &expected);
        assert!(apart < 1e-2 * moved, "{}: updates differ by {apart} of {moved}", fast.case());
    }
}

/// A walk over all ordered pairs of stages, each once.
fn all_changes() -> Vec<u8> {
    let mut walk = vec![0];
    for a in 0..=3 {
        walk.push(a);
        for b in a + 1..=3 {
            walk.extend([b, a]);
        }
        if a < 3 {
            walk.push(a + 1);
        }
    }
    // (a, a) by staying, (a, b) and (b, a) by going there and back; the ways on are seen twice.
    walk
}

#[test]
fn the_walk_takes_every_change() {
    let walk = all_changes();
    let mut seen: Vec<(u8, u8)> = walk.windows(2).map(|pair| (pair[0], pair[1])).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 16, "{walk:?}");
}

/// Every change of stage in mid-run leaves the bits of a run that never changed.
#[test]
fn any_stage_becomes_any_other() {
    for (ranks, dtype, rule) in [(2, DType::Float32, 0), (3, DType::Bfloat16, 4), (2, DType::Float16, 3)] {
        let lab = deep().on(ranks, 0).with(|lab| {
            lab.options.dtype = dtype;
            lab.options.loss_scale.initial = 64.0;
            lab.options.loss_scale.window = 3;
            lab.optimizer = rules().swap_remove(rule).1;
            lab.global = 6;
        });
        let walk = all_changes();
        let (reports, hash) = lab.on(1, 0).steps(walk.len());
        let changed = lab.run(|mut bench| {
            let mut seen = vec![bench.step()?];
            for (from, to) in walk.iter().zip(&walk[1..]) {
                let before = bench.engine.state_hash()?;
                bench.engine = bench.engine.rebuild(lab.stages(*to))?;
                assert_eq!(bench.engine.state_hash()?, before, "{from} to {to}: moved state");
                seen.push(bench.step()?);
            }
            Ok((seen, bench.engine.state_hash()?))
        });
        for (seen, found) in changed.unwrap_or_else(|error| panic!("{}: {error}", lab.case())) {
            assert_eq!(bits(&seen), bits(&reports), "{dtype:?} N={ranks}");
            assert_eq!(found, hash, "{dtype:?} N={ranks}: state");
        }
    }
}

/// A parameter that was frozen for two steps is thawed: it has moved by what its first update is, and counts from there.
#[test]
fn a_frozen_parameter_is_thawed_in_mid_run() -> Result<()> {
    let rate = 1e-2;
    let frozen = |frozen: bool| {
        let weight_decay = (!frozen).then_some(0.0);
        let groups = vec![GroupRule { pattern: "b.weight".into(), frozen, weight_decay, ..GroupRule::default() }];
        let config = AdamWConfig { lr: rate, groups, ..AdamWConfig::default() };
        Arc::new(config.rule().expect("in range"))
    };
    for dtype in [DType::Float32, DType::Bfloat16] {
        let mut states = Vec::new();
        for (ranks, stage) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)] {
            let lab = deep().on(ranks, stage).with(|lab| {
                lab.optimizer = frozen(true);
                lab.options.dtype = dtype;
                lab.options.clip = 0.0;
            });
            let thawed = lab.with(|lab| lab.optimizer = frozen(false));
            let case = format!("{dtype:?} {}", lab.case());
            let seen = lab.run(|mut bench| {
                let start = bench.masters()?;
                bench.step()?;
                bench.step()?;
                let still = bench.masters()?;
                assert_eq!(of(&still, "b.weight"), of(&start, "b.weight"), "{case}");
                assert!(!bench.engine.counts().contains_key("b.weight"), "{case}");
                bench.engine = bench.engine.rebuild(thawed.own_stages())?;
                assert_eq!(bench.masters()?, still, "{case}: thawing moves nothing");
                bench.step()?;
                assert_eq!(bench.engine.counts()["b.weight"], 1, "{case}");
                assert_eq!(bench.engine.counts()["a.weight"], 3, "{case}");
                // AdamW's first update is the rate itself, whatever the gradient. A count of 3 would make it 0.6 of it.
                let moved = bench.masters()?;
                for (now, before) in of(&moved, "b.weight").iter().zip(of(&still, "b.weight")) {
                    let step = f64::from((now - before).abs());
                    assert!((step / rate - 1.0).abs() < 1e-2, "{case}: moved by {step}");
                }
                bench.engine = bench.engine.rebuild(lab.own_stages())?;
                let again = bench.masters()?;
                bench.step()?;
                assert_eq!(of(&bench.masters()?, "b.weight"), of(&again, "b.weight"), "{case}: frozen again");
                bench.engine.state_hash()
            })?;
            states.extend(seen);
        }
        states.dedup();
        assert_eq!(states.len(), 1, "{dtype:?}: {states:?}");
    }
    Ok(())
}
