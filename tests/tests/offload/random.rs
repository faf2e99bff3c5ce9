//! Random models on random ranks under random settings of ZenFlow, against the oracle, bit for bit.
//!
//! `ZF_TEST_MODELS` says how many (8), `ZF_TEST_SEED` which is the first (1); a failure prints the seed of its model.

use std::collections::BTreeMap;

use zf_core::Result;
use zf_core::bytes::ByteSize;
use zf_core::layout::DType;
use zf_core::stage::{AccumulateOn, Axis, Promotion};
use zf_offload::kinds::{LearningRate, TierKind};
use zf_optim::{AdamWConfig, CosineConfig};

use super::Zenflow;
use super::oracle::{Outcome, Rules, bits_of, simulate};
use crate::lab::Lab;
use crate::random::{Announce, Dice, draw, number, scattered};

const EPS: f64 = 1e-8;
const BETAS: [f64; 2] = [0.9, 0.95];

/// What the engine gives, with the norms that it reports.
fn train(lab: &Lab, steps: usize) -> (Outcome, Vec<f64>) {
    let ran = lab.run(|mut bench| {
        let reports = (0..steps).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
        bench.engine.drain()?;
        let mut state = BTreeMap::new();
        bench.engine.for_each_logical(&mut |name, kind, values| {
            // In float32 a parameter is its own master.
            let kind = if kind == "parameter" { "master" } else { kind };
            state.insert((name.to_owned(), kind.to_owned()), bits_of(values));
            Ok(())
        })?;
        assert!(reports.iter().all(|report| !report.skipped), "a step was skipped");
        let losses = reports.iter().map(|report| report.loss.to_bits()).collect();
        Ok((Outcome { losses, state }, reports.iter().map(|report| report.grad_norm).collect::<Vec<_>>()))
    });
    let mut ran = ran.unwrap_or_else(|error| panic!("{}: {error}", lab.case()));
    let last = ran.pop().expect("at least one rank");
    assert!(ran.iter().all(|other| *other == last), "{}: the ranks disagree", lab.case());
    last
}

/// A drawn model in a type that one rank's autograd can follow.
fn model(seed: u64) -> Option<(Lab, String)> {
    let (lab, description) = draw(seed);
    let own_type = lab.model.units().iter().flat_map(|unit| &unit.params).any(|spec| spec.dtype.is_some());
    if own_type || lab.options.dtype == DType::Float16 {
        return None;
    }
    let groups = lab.optimizer.base().groups.clone();
    let config = AdamWConfig { lr: 1e-2, betas: BETAS, eps: EPS, weight_decay: 0.1, groups };
    let lab = lab.with(|lab| {
        lab.optimizer = std::sync::Arc::new(config.rule().expect("in range"));
        let cosine = CosineConfig { warmup: 3, ..CosineConfig::default() };
        lab.schedule = std::sync::Arc::new(cosine.schedule().expect("in range"));
    });
    Some((lab, description))
}

fn rules(dice: &mut Dice) -> Rules {
    let interval = dice.pick(&[1, 2, 3, 4]);
    Rules {
        ratio: dice.pick(&[0.1, 0.3, 0.5, 0.8, 1.0]),
        interval,
        every: interval * dice.pick(&[1, 1, 2, 3]),
        asynchronous: dice.percent(70),
        late: dice.percent(40),
        warmup: dice.pick(&[0, 0, 1, 3]),
        mean_lr: dice.percent(30),
        axis: dice.pick(&[Axis::Input, Axis::Input, Axis::Output]),
        fold: dice.percent(50),
        betas: BETAS,
        eps: EPS,
    }
}

/// The same with the engine's settings, of which several must not matter.
fn settings(dice: &mut Dice, rules: &Rules) -> Zenflow {
    Zenflow::new(rules.ratio, rules.interval, rules.every).with(|zenflow| {
        zenflow.select.axis = rules.axis;
        let config = &mut zenflow.config;
        config.asynchronous = rules.asynchronous;
        config.promotion = if rules.late { Promotion::Late } else { Promotion::Flush };
        config.warmup = rules.warmup;
        config.learning_rate = if rules.mean_lr { LearningRate::Mean } else { LearningRate::Last };
        config.fold = rules.fold;
        config.accumulate = dice.pick(&[AccumulateOn::Host, AccumulateOn::Device]);
        config.buffer = ByteSize(dice.pick(&[64, 256, 8 << 20]));
        config.buffers = dice.pick(&[2, 5]);
        config.tier = dice.pick(&[TierKind::Host, TierKind::Host, TierKind::Host, TierKind::File]);
    })
}

/// The first difference, in words.
fn compare(case: &str, found: &Outcome, expected: &Outcome) {
    for (step, (found, expected)) in found.losses.iter().zip(&expected.losses).enumerate() {
        let [found, expected] = [found, expected].map(|bits| f64::from_bits(*bits));
        assert!(found == expected, "{case}: loss of step {step} is {found}, expected {expected}");
    }
    for (place, expected) in &expected.state {
        let found = found.state.get(place).unwrap_or_else(|| panic!("{case}: no {place:?}"));
        let different = found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
        assert_eq!((found.len(), different), (expected.len(), 0), "{case}: elements of {place:?} that differ");
    }
}

fn check(seed: u64) {
    let Some((base, description)) = model(seed) else { return };
    let mut dice = Dice(seed ^ 0x0FF1_0AD0);
    let _announce = Announce(format!("ZF_TEST_SEED={seed} ZF_TEST_MODELS=1 draws this model again:\n{description}"));
    for _ in 0..3 {
        let steps = 5 + dice.below(9);
        let rules = rules(&mut dice);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let lab = settings(&mut dice, &rules).of(&scattered(&mut dice, &base)).with(|lab| {
            lab.options.total_steps = steps as u64;
            lab.options.folder = folder.path().to_path_buf();
        });
        let (found, norms) = train(&lab, steps);
        let expected = simulate(&lab, &rules, &norms);
        let policy = lab.offload.as_ref().and_then(|offload| offload.offload.policy());
        compare(&format!("{steps} steps of {rules:?}, {policy:?}, {}", lab.case()), &found, &expected);
    }
}

#[test]
fn any_layout_and_setting_gives_the_bits_of_the_rules() {
    let (first, models) = (number("ZF_TEST_SEED", 1), number("ZF_TEST_MODELS", 8));
    (first..first + models).for_each(check);
    println!("models of seeds {first} to {}", first + models - 1);
}

/// Real layers: attention, norms, GPT-2's transposed weights and tied head.
fn tiny(name: &str, dtype: DType, rules: &Rules) {
    let steps = 9;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lab = Lab::tiny(name).with(|lab| {
        (lab.global, lab.micro) = (2, 1);
        lab.options.dtype = dtype;
        lab.options.clip = 1.0;
        lab.options.folder = folder.path().to_path_buf();
    });
    let mut dice = Dice(7);
    // Buffers of 64 bytes are for models of a few elements.
    let mut settings = |rules: &Rules| {
        settings(&mut dice, rules).with(|zenflow| zenflow.config.buffer.0 = zenflow.config.buffer.0.max(4096))
    };
    let (found, norms) = train(&settings(rules).of(&lab), steps);
    compare(&format!("{name} {dtype:?} {rules:?}"), &found, &simulate(&lab, rules, &norms));
    // One window more of delay would be seen.
    let other = Rules { asynchronous: !rules.asynchronous, ..rules.clone() };
    assert_ne!(train(&settings(&other).of(&lab), steps).0.losses, found.losses);
}

fn usual() -> Rules {
    Rules {
        ratio: 0.2,
        interval: 2,
        every: 4,
        asynchronous: true,
        late: false,
        warmup: 1,
        mean_lr: false,
        axis: Axis::Input,
        fold: false,
        betas: BETAS,
        eps: EPS,
    }
}

#[test]
fn llama_follows_the_rules() {
    tiny("tiny-llama", DType::Float32, &usual());
    tiny("tiny-llama", DType::Bfloat16, &Rules { late: true, every: 2, warmup: 0, ..usual() });
}

#[test]
fn gpt2_follows_the_rules() {
    tiny("tiny-gpt2", DType::Float32, &Rules { late: true, every: 2, ..usual() });
    tiny("tiny-gpt2", DType::Bfloat16, &Rules { axis: Axis::Output, interval: 3, every: 3, ..usual() });
}
