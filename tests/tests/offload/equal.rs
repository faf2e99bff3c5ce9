//! What must change no bit: the equivalences that define ZenFlow, and settings that are only about time and memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use zf_core::bytes::ByteSize;
use zf_core::config::Unused;
use zf_core::layout::DType;
use zf_core::model::{Batch, Context};
use zf_core::registry::{BuildContext, Choice};
use zf_core::stage::{AccumulateOn, Axis, GroupRule, Optimizer, Selector};
use zf_offload::kinds::TierKind;
use zf_optim::{AdamWConfig, LionConfig, SgdConfig};
use zf_select::{FixedConfig, Interval, RandomConfig};

use super::{Zenflow, differ, drained, expect, host, same};
use crate::lab::{Lab, Toy, bits, embedding, head, layer, run_embedding, run_head, run_layer, unit, unused, weight};

const STEPS: usize = 8;

/// A few small steps with clipping.
pub(super) fn tiny(name: &str, dtype: DType) -> Lab {
    Lab::tiny(name).with(|lab| {
        (lab.global, lab.micro) = (4, 1);
        lab.options.dtype = dtype;
        lab.options.clip = 1.0;
        lab.options.loss_scale.initial = 256.0;
    })
}

const MODELS: [&str; 2] = ["tiny-llama", "tiny-gpt2"];
const TYPES: [DType; 3] = [DType::Float32, DType::Bfloat16, DType::Float16];

#[test]
fn zero_offload_is_no_offload() {
    for (model, dtype) in MODELS.iter().flat_map(|model| TYPES.map(|dtype| (*model, dtype))) {
        let plain = tiny(model, dtype);
        let known = drained(&plain, STEPS);
        for (ranks, stage) in [(1, 0), (2, 1), (2, 3), (4, 2)] {
            expect(&format!("{model} {dtype:?}"), &known, &host(&plain.on(ranks, stage), |_| {}), STEPS);
        }
    }
}

/// k = 1, whatever the window.
#[test]
fn everything_chosen_is_adamw() {
    for (model, dtype) in [("tiny-llama", DType::Float32), ("tiny-gpt2", DType::Bfloat16)] {
        let plain = tiny(model, dtype).on(2, 1);
        let known = drained(&plain, STEPS);
        for (interval, every) in [(1, 1), (2, 4), (3, 3), (20, 20)] {
            let all = Zenflow::new(1.0, interval, every);
            expect("k = 1", &known, &all.of(&plain), STEPS);
            expect("k = 1, late", &known, &all.late().of(&plain.on(2, 3)), STEPS);
        }
    }
}

/// S = 1, each window visible at once, whatever is chosen; one later it is something else.
#[test]
fn synchronous_windows_of_one_are_adamw() {
    for (model, dtype) in [("tiny-llama", DType::Bfloat16), ("tiny-gpt2", DType::Float32)] {
        let plain = tiny(model, dtype).on(2, 2);
        let known = drained(&plain, STEPS);
        for (ratio, every) in [(0.05, 1), (0.5, 2), (0.3, 3)] {
            let zenflow = Zenflow::new(ratio, 1, every).synchronous();
            expect("S = 1", &known, &zenflow.of(&plain), STEPS);
            let rows = zenflow.with(|zenflow| zenflow.select.axis = Axis::Output);
            expect("S = 1, rows", &known, &rows.of(&plain.on(1, 0)), STEPS);
        }
        differ("asynchronous", &known, &Zenflow::new(0.3, 1, 1).of(&plain), STEPS);
        differ("S = 2", &known, &Zenflow::new(0.3, 2, 2).synchronous().of(&plain), STEPS);
    }
}

/// Other ways to choose move other columns at other times, and as little.
#[test]
fn any_selector_serves() {
    let plain = tiny("tiny-llama", DType::Float32).on(2, 1);
    let known = drained(&plain, STEPS);
    let base = Zenflow::new(0.3, 1, 1).synchronous();
    let random = RandomConfig { ratio: 0.4, every: Interval::Updates(2), ..RandomConfig::default() };
    let random: Arc<dyn Selector> = Arc::new(random.selector(3).expect("in range"));
    expect("random", &known, &base.choosing(&plain, random), STEPS);
    let nothing: Arc<dyn Selector> = Arc::new(fixed(&BTreeMap::new(), 1));
    expect("nothing chosen", &known, &base.choosing(&plain, nothing), STEPS);
}

/// A score may read masters and moments, which are with the host, while an update of them waits for buffers.
#[test]
fn scores_read_states_wherever_they_are() {
    let plain = tiny("tiny-llama", DType::Bfloat16);
    let mut states = Vec::new();
    for score in ["adam", "weight-gradient", "l2"] {
        for base in [Zenflow::new(0.2, 2, 2), Zenflow::new(0.2, 2, 2).late()] {
            let base = base.with(|zenflow| zenflow.select.score = Choice::named(score));
            let known = drained(&base.of(&plain), STEPS);
            let tight = base.with(|zenflow| {
                zenflow.config.accumulate = AccumulateOn::Device;
                (zenflow.config.buffer, zenflow.config.buffers) = (ByteSize(512), 2);
            });
            expect(score, &known, &tight.of(&plain.on(2, 1)), STEPS);
            expect(score, &known, &tight.of(&plain.on(4, 3)), STEPS);
            states.push(known.1);
        }
    }
    states.sort_unstable();
    states.dedup();
    assert_eq!(states.len(), 6, "every score and promotion gives a state of its own");
}

#[test]
fn rules_without_and_with_one_state() {
    let base = tiny("tiny-llama", DType::Bfloat16);
    let rules: [Arc<dyn Optimizer>; 3] = [
        Arc::new(SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 0.1, groups: vec![] }.rule().expect("in range")),
        Arc::new(SgdConfig { lr: 0.05, momentum: 0.0, weight_decay: 0.0, groups: vec![] }.rule().expect("in range")),
        Arc::new(LionConfig { lr: 1e-3, ..LionConfig::default() }.rule().expect("in range")),
    ];
    for rule in rules {
        let plain = base.with(|lab| lab.optimizer = rule.clone());
        let known = drained(&plain, STEPS);
        expect("ZeRO-Offload", &known, &host(&plain.on(2, 2), |_| {}), STEPS);
        expect("S = 1", &known, &Zenflow::new(0.3, 1, 2).synchronous().of(&plain.on(2, 1)), STEPS);
        expect("k = 1", &known, &Zenflow::new(1.0, 4, 4).of(&plain.on(2, 3)), STEPS);
        let delayed = Zenflow::new(0.3, 2, 2);
        same("stages", &delayed.of(&plain), &delayed.of(&plain.on(4, 3)), STEPS);
    }
}

/// float16 with a loss scale that is too large at first: steps are skipped, by all or none, and no window sees them.
#[test]
fn skipped_steps_are_in_no_window() {
    for model in MODELS {
        let plain = tiny(model, DType::Float16).with(|lab| {
            lab.options.loss_scale.initial = 2f64.powi(24);
            lab.options.loss_scale.hysteresis = 1;
            lab.options.loss_scale.window = 3;
        });
        let steps = 14;
        let known = drained(&plain, steps);
        let skipped = known.0.iter().filter(|report| report.skipped).count();
        assert!((1..steps - 3).contains(&skipped), "{model}: {skipped} of {steps} steps were skipped");
        expect(model, &known, &host(&plain.on(2, 1), |_| {}), steps);
        expect(model, &known, &Zenflow::new(0.3, 1, 2).synchronous().of(&plain.on(2, 2)), steps);
        expect(model, &known, &Zenflow::new(1.0, 3, 3).of(&plain.on(2, 3)), steps);
        let delayed = Zenflow::new(0.2, 2, 2);
        let known = drained(&delayed.of(&plain), steps);
        expect(model, &known, &delayed.of(&plain.on(2, 3)), steps);
        let on_device = delayed.with(|zenflow| zenflow.config.accumulate = AccumulateOn::Device);
        expect(model, &known, &on_device.of(&plain.on(4, 1)), steps);
    }
}

/// A file of the columns that were chosen, for the selector `fixed`.
fn fixed(columns: &BTreeMap<String, Vec<u32>>, every: u64) -> zf_select::Fixed {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("columns.json");
    std::fs::write(&path, serde_json::to_vec(columns).expect("serializes")).expect("a temporary file");
    let config = FixedConfig { path, axis: Axis::Input, every: Interval::Updates(every) };
    config.selector(&BuildContext::default()).expect("written above")
}

/// Choosing the same columns again moves nothing and changes nothing, however often.
#[test]
fn the_same_columns_again_are_no_change() {
    let plain = tiny("tiny-llama", DType::Bfloat16).on(2, 1);
    let columns: BTreeMap<String, Vec<u32>> = plain
        .model
        .units()
        .iter()
        .flat_map(|unit| &unit.params)
        .filter(|spec| spec.shape.len() == 2 && !spec.name.contains("up_proj"))
        .map(|spec| (spec.name.clone(), vec![0, 3, 4, 30]))
        .collect();
    for zenflow in [Zenflow::new(0.1, 2, 2), Zenflow::new(0.1, 2, 2).late(), Zenflow::new(0.1, 2, 2).synchronous()] {
        let choosing = |every| zenflow.choosing(&plain, Arc::new(fixed(&columns, every)));
        let known = drained(&choosing(100), STEPS);
        for every in [2, 4, 6] {
            expect(&format!("every {every}"), &known, &choosing(every), STEPS);
        }
        let moved = choosing(2).run(|mut bench| {
            // Columns that a step chooses arrive in the next one.
            bench.step()?;
            bench.step()?;
            let first = bench.engine.link_traffic().moves;
            for _ in 2..STEPS {
                bench.step()?;
            }
            Ok((first, bench.engine.link_traffic().moves))
        });
        for (first, last) in moved.expect("runs") {
            assert!(first > 0 && first == last, "{first} bytes at first, {last} in the end");
        }
        differ("other columns", &known, &zenflow.of(&plain), STEPS);
    }
}

/// Where gradients are added up, where states lie, and how large buffers are.
#[test]
fn places_and_buffers_change_no_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (model, dtype) in [("tiny-llama", DType::Bfloat16), ("tiny-gpt2", DType::Float32)] {
        let plain = tiny(model, dtype).on(2, 1).with(|lab| lab.options.folder = folder.path().to_path_buf());
        for base in [Zenflow::new(0.2, 2, 4), Zenflow::new(0.2, 3, 3).late()] {
            let known = drained(&base.of(&plain), STEPS);
            let changed = |change: fn(&mut Zenflow)| base.clone().with(change).of(&plain);
            expect("device", &known, &changed(|z| z.config.accumulate = AccumulateOn::Device), STEPS);
            expect("file", &known, &changed(|z| z.config.tier = TierKind::File), STEPS);
            let tight = changed(|z| (z.config.buffer, z.config.buffers) = (ByteSize(1 << 10), 2));
            expect("buffers", &known, &tight, STEPS);
            let all = changed(|z| {
                (z.config.accumulate, z.config.tier) = (AccumulateOn::Device, TierKind::File);
                (z.config.buffer, z.config.buffers) = (ByteSize(3 << 10), 3);
            });
            expect("all of it", &known, &all.on(4, 3), STEPS);
        }
        let known = drained(&plain, STEPS);
        expect("ZeRO-Offload, file", &known, &host(&plain, |config| config.tier = TierKind::File), STEPS);
        let tight = |config: &mut zf_offload::kinds::HostConfig| {
            (config.buffer, config.buffers) = (ByteSize(1 << 10), 2);
        };
        expect("ZeRO-Offload, buffers", &known, &host(&plain.on(4, 3), tight), STEPS);
    }
}

/// Several micro-batches a step: only their sum goes into the window.
#[test]
fn micro_batches_are_apart_from_windows() {
    for micro in [4, 2, 1] {
        let plain = tiny("tiny-gpt2", DType::Float32).with(|lab| lab.micro = micro);
        let known = drained(&plain, STEPS);
        expect("ZeRO-Offload", &known, &host(&plain, |_| {}), STEPS);
        expect("S = 1", &known, &Zenflow::new(0.3, 1, 1).synchronous().of(&plain), STEPS);
        let zenflow = Zenflow::new(0.3, 2, 2);
        let known = drained(&zenflow.of(&plain), STEPS);
        let ranks = 4 / micro;
        expect("turns and ranks", &known, &zenflow.of(&plain.on(ranks, 2)), STEPS);
        let on_device = zenflow.with(|zenflow| zenflow.config.accumulate = AccumulateOn::Device);
        expect("on the device", &known, &on_device.of(&plain.on(ranks, 1)), STEPS);
    }
}

/// W windows of one update, each visible at once, then windows of S.
#[test]
fn warming_up_is_adamw() {
    let plain = tiny("tiny-llama", DType::Bfloat16).on(2, 1);
    let warm = Zenflow::new(0.2, 2, 2).with(|zenflow| zenflow.config.warmup = 3);
    same("while warming up", &plain, &warm.of(&plain), 3);
    let (adamw, found) = (drained(&plain, STEPS), drained(&warm.of(&plain), STEPS));
    assert_eq!(bits(&adamw.0[..4]), bits(&found.0[..4]), "the losses that these updates lead to");
    assert_ne!(bits(&adamw.0[4..]), bits(&found.0[4..]), "then windows begin");
    let cold = drained(&Zenflow::new(0.2, 2, 2).of(&plain), STEPS);
    assert_ne!(bits(&adamw.0[..4]), bits(&cold.0[..4]), "without warm-up they begin at once");
}

/// Rates and decay by group, which go with a column wherever it is; frozen parameters.
#[test]
fn groups_keep_their_numbers() {
    let rule =
        |pattern: &str, lr, weight_decay, frozen| GroupRule { pattern: pattern.into(), lr, weight_decay, frozen };
    let groups = vec![
        rule("layers.1.mlp.up_proj", None, None, true),
        rule("mlp", Some(0.03), Some(0.0), false),
        rule("embed", None, Some(0.5), false),
        rule("norm", Some(0.001), Some(0.2), false),
    ];
    let config = AdamWConfig { lr: 1e-2, groups, ..AdamWConfig::default() };
    let grouped = tiny("tiny-llama", DType::Bfloat16).with(|lab| {
        lab.optimizer = Arc::new(config.rule().expect("in range"));
    });
    let known = drained(&grouped, STEPS);
    expect("ZeRO-Offload", &known, &host(&grouped.on(2, 3), |_| {}), STEPS);
    expect("S = 1", &known, &Zenflow::new(0.3, 1, 2).synchronous().of(&grouped.on(2, 1)), STEPS);
    expect("k = 1", &known, &Zenflow::new(1.0, 4, 4).of(&grouped.on(2, 2)), STEPS);
    let delayed = Zenflow::new(0.3, 2, 2).late();
    same("delayed", &delayed.of(&grouped), &delayed.of(&grouped.on(4, 3)), STEPS);
    differ("without groups", &known, &tiny("tiny-llama", DType::Bfloat16), STEPS);
}

/// A block that only some steps use, with one that none does.
fn seldom() -> Lab {
    let never = unit("never", vec![weight("never.weight", &[6, 6]), weight("never.bias", &[6])]);
    Lab::of(Toy::new(
        vec![embedding(), layer("often"), layer("seldom"), never, head()],
        |cx: &dyn Context, batch: &Batch| {
            let x = run_embedding(cx, 0, &batch.inputs)?;
            let mut x = run_layer(cx, 1, &x)?;
            if cx.noise().step % 3 == 1 {
                x = run_layer(cx, 2, &x)?;
            } else {
                cx.skip(2)?;
            }
            cx.skip(3)?;
            run_head(cx, 4, &x)
        },
    ))
}

#[test]
fn unused_parameters_follow_the_setting() {
    let states = [Unused::Skip, Unused::Zeros].map(|setting| {
        let plain = unused(&seldom(), setting);
        let known = drained(&plain, STEPS);
        expect("ZeRO-Offload", &known, &host(&plain.on(2, 2), |_| {}), STEPS);
        expect("S = 1", &known, &Zenflow::new(0.4, 1, 2).synchronous().of(&plain.on(3, 1)), STEPS);
        expect("k = 1", &known, &Zenflow::new(1.0, 3, 3).of(&plain.on(2, 3)), STEPS);
        let delayed = Zenflow::new(0.4, 2, 2);
        let zenflow = drained(&delayed.of(&plain), STEPS);
        expect("delayed", &zenflow, &delayed.of(&plain.on(3, 3)), STEPS);
        let on_device = delayed.with(|zenflow| zenflow.config.accumulate = AccumulateOn::Device);
        expect("on the device", &zenflow, &on_device.of(&plain.on(2, 1)), STEPS);
        (known.1, zenflow.1)
    });
    assert!(states[0].0 != states[1].0 && states[0].1 != states[1].1, "zeros are an update, skipping is none");
}
