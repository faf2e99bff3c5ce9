//! Random models under random scopes: what one rank that holds everything gives, bit for bit in exact mode, within
//! rounding in fast mode.
//!
//! `ZF_TEST_MODELS` says how many (20), `ZF_TEST_SEED` which is the first (1); a failure prints the seed of its model.

use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};
use zf_comm::{Reordering, ReorderingConfig, wrap};
use zf_core::bytes::ByteSize;
use zf_core::config::{Accumulate, ReduceWhen, Unused};
use zf_core::layout::DType;
use zf_core::model::{Batch, Context, Init, ParamSpec, Params, UnitSpec};
use zf_core::stage::{GroupRule, Needs, Optimizer};
use zf_optim::{AdamWConfig, LambConfig, LionConfig, MuonConfig, SgdConfig};
use zf_partition::{ReshardAfterForward, Scope, Scopes, ZeroConfig};

use crate::lab::{Lab, Toy, VOCABULARY, bits, distance, run, run_embedding, run_head, unit, weight};

const STEPS: usize = 3;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.roll() % end as u64) as usize
    }

    pub(crate) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    pub(crate) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// When a parameter is used.
#[derive(Debug, Clone, Copy)]
enum Use {
    Always,
    Never,
    /// In the micro-batch of one sequence, so on one rank.
    Sequence(u64),
    /// In one step.
    Step(u64),
}

impl Use {
    fn roll(dice: &mut Dice) -> Self {
        match dice.below(8) {
            0 => Self::Never,
            1 | 2 => Self::Sequence(dice.roll() % 4),
            3 => Self::Step(dice.roll() % STEPS as u64),
            _ => Self::Always,
        }
    }

    fn applies(self, step: u64, sequences: &[u64]) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Sequence(sequence) => sequences.contains(&sequence),
            Self::Step(only) => step == only,
        }
    }
}

/// A unit between embedding and head.
#[derive(Debug, Clone)]
struct Block {
    /// Its first two parameters are the weight and bias of a residual layer.
    layer: bool,
    /// How the others are used.
    extras: Vec<Use>,
    /// Left out in this step.
    skipped: Option<u64>,
    /// Runs twice in a forward pass.
    twice: bool,
}

/// A model of the drawn units.
fn model(dice: &mut Dice) -> Toy {
    let width = 2 + dice.below(6) as i64;
    let tied = dice.percent(40);
    let table = weight("embed.weight", &[VOCABULARY, width]);
    let mut first = unit("embed", vec![if tied { table.alias("head.weight") } else { table }]);
    first.root = tied;
    if !tied && dice.percent(20) {
        first.params[0].trainable = false;
    }
    let (mut units, mut blocks) = (vec![first], Vec::new());
    for index in 0..1 + dice.below(4) {
        let (unit, block) = block(dice, index, width);
        units.push(unit);
        blocks.push(block);
    }
    let head = units.len();
    if !tied {
        units.push(unit("head", vec![weight("head.weight", &[VOCABULARY, width])]));
    }
    Toy::new(units, move |cx, batch| {
        let mut x = run_embedding(cx, 0, &batch.inputs)?;
        for (index, block) in blocks.iter().enumerate() {
            if block.skipped == Some(cx.noise().step) {
                cx.skip(index + 1)?;
                continue;
            }
            for _ in 0..1 + usize::from(block.twice) {
                x = run_block(cx, index + 1, block, &x, batch)?;
            }
        }
        run_head(cx, if tied { 0 } else { head }, &x)
    })
}

/// Shapes of every kind: without elements, without dimensions, smaller than a world, larger than a bucket.
fn shape(dice: &mut Dice) -> Vec<i64> {
    let fixed: [&[i64]; 9] = [&[], &[0], &[1], &[0, 3], &[2, 0, 2], &[1, 1], &[40, 3], &[257], &[3, 2, 2]];
    if dice.percent(60) {
        return dice.pick(&fixed).to_vec();
    }
    (0..1 + dice.below(2)).map(|_| 1 + dice.below(9) as i64).collect()
}

fn block(dice: &mut Dice, index: usize, width: i64) -> (UnitSpec, Block) {
    let name = format!("block{index}");
    let layer = dice.percent(70);
    let mut params = Vec::new();
    if layer {
        params.push(weight(&format!("{name}.weight"), &[width, width]));
        params.push(weight(&format!("{name}.bias"), &[width]));
    }
    let extras: Vec<Use> = (0..dice.below(5)).map(|_| Use::roll(dice)).collect();
    for extra in 0..extras.len() {
        params.push(ParamSpec::new(format!("{name}.extra{extra}"), &shape(dice), Init::Normal { std: 0.4 }));
    }
    let whole = dice.percent(15);
    for spec in &mut params {
        spec.trainable = !whole && !dice.percent(15);
        if dice.percent(15) {
            spec.dtype = Some(dice.pick(&[DType::Float32, DType::Bfloat16]));
        }
    }
    let twice = dice.percent(15);
    let skipped = dice.percent(20).then(|| dice.roll() % STEPS as u64);
    (UnitSpec { name, params, root: twice || dice.percent(10) }, Block { layer, extras, skipped, twice })
}

/// x + tanh(x W^T + b) + the sum of the squares of each further parameter.
fn run_block(cx: &dyn Context, index: usize, block: &Block, x: &Tensor, batch: &Batch) -> anyhow::Result<Tensor> {
    let (layer, step) = (block.layer, cx.noise().step);
    let used: Vec<bool> = block.extras.iter().map(|extra| extra.applies(step, &batch.sequences)).collect();
    run(cx, index, x, move |p: &Params<'_>, x| {
        let mut y = x.shallow_clone();
        if layer {
            let (w, b) = (p.at(0)?.f_to_kind(x.kind())?, p.at(1)?.f_to_kind(x.kind())?);
            y = y.f_add(&x.f_linear(&w, Some(&b))?.f_tanh()?)?;
        }
        for (extra, _) in used.iter().enumerate().filter(|(_, used)| **used) {
            let p = p.at(extra + if layer { 2 } else { 0 })?;
            let sum = p.f_to_kind(Kind::Float)?.f_square()?.f_sum(Kind::Float)?.f_mul_scalar(0.05)?;
            // Not the same for all elements of x: the softmax would not see it.
            let width = x.size()[2];
            let ramp = Tensor::f_linspace(-1.0, 1.0, width, (Kind::Float, x.device()))?;
            y = y.f_add(&ramp.f_mul(&sum)?.f_to_kind(x.kind())?)?;
        }
        Ok(y.f_contiguous()?)
    })
}

/// Groups by unit and by name, of which some get no parameter because an earlier one matches all of theirs.
fn groups(dice: &mut Dice, units: &[UnitSpec]) -> Vec<GroupRule> {
    let blocks: Vec<&UnitSpec> = units.iter().filter(|unit| unit.name.starts_with("block")).collect();
    let names: Vec<String> = blocks.iter().flat_map(|unit| &unit.params).map(|spec| spec.name.clone()).collect();
    if names.is_empty() {
        return Vec::new();
    }
    let rule = |dice: &mut Dice| {
        let name = dice.pick(&names);
        let unit = name.split('.').next().unwrap_or(&name).to_owned();
        let pattern = dice.pick(&[name.clone(), format!("{unit}."), format!("{unit}*"), "block".to_owned()]);
        let (lr, weight_decay) = dice.pick(&[(Some(0.03), None), (None, Some(0.2)), (Some(0.004), Some(0.0))]);
        match dice.percent(25) {
            true => GroupRule { pattern, frozen: true, ..GroupRule::default() },
            false => GroupRule { pattern, lr, weight_decay, frozen: false },
        }
    };
    (0..dice.below(4)).map(|_| rule(dice)).collect()
}

fn optimizer(dice: &mut Dice, groups: Vec<GroupRule>) -> (Arc<dyn Optimizer>, &'static str) {
    const GOOD: &str = "in range";
    match dice.below(6) {
        0 => (Arc::new(SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.1, groups }.rule().expect(GOOD)), "sgd"),
        1 => {
            let config = LionConfig { lr: 1e-3, weight_decay: 0.1, groups, ..LionConfig::default() };
            (Arc::new(config.rule().expect(GOOD)), "lion")
        }
        2 => {
            let config = LambConfig { lr: 1e-2, weight_decay: 0.1, groups, ..LambConfig::default() };
            (Arc::new(config.rule().expect(GOOD)), "lamb")
        }
        3 => {
            let config = MuonConfig { lr: 1e-2, weight_decay: 0.1, groups, ..MuonConfig::default() };
            (Arc::new(config.rule().expect(GOOD)), "muon")
        }
        _ => {
            let config = AdamWConfig { lr: 1e-2, weight_decay: 0.1, groups, ..AdamWConfig::default() };
            (Arc::new(config.rule().expect(GOOD)), "adamw")
        }
    }
}

fn divisors(of: usize) -> Vec<usize> {
    (1..=of).filter(|d| of.is_multiple_of(*d)).collect()
}

/// Any scopes, and any way to travel.
fn zero(dice: &mut Dice, ranks: usize) -> ZeroConfig {
    let o = dice.pick(&divisors(ranks));
    let g = dice.pick(&divisors(o));
    let p = dice.pick(&divisors(g));
    let scope = Scopes { p: Scope::Ranks(p), g: Scope::Ranks(g), o: Scope::Ranks(o) };
    let reshard_after_forward = match dice.below(4) {
        0 => ReshardAfterForward::Keep,
        1 => ReshardAfterForward::Ranks(dice.pick(&divisors(p))),
        _ => ReshardAfterForward::Free,
    };
    ZeroConfig {
        bucket: ByteSize(dice.pick(&[1, 24, 100, 700, 25_000_000])),
        prefetch: dice.below(4),
        persist_below: dice.pick(&[0, 0, 20, 1000]),
        max_live_units: 1 + dice.below(4),
        reshard_after_forward,
        ..ZeroConfig::scope(scope)
    }
}

/// A lab on one rank, dense and exact, and what it is.
pub(crate) fn draw(seed: u64) -> (Lab, String) {
    let mut dice = Dice(seed);
    let dice = &mut dice;
    let toy = model(dice);
    let groups = groups(dice, &toy.units);
    let (optimizer, rule) = optimizer(dice, groups);
    let described = toy.units.iter().map(describe).collect::<Vec<_>>().join("\n  ");
    let lab = Lab::of(toy).on(1, 0).with(|lab| {
        lab.optimizer = optimizer;
        (lab.global, lab.micro) = (dice.pick(&[2, 3, 4, 6, 8]), 1);
        lab.options.dtype = dice.pick(&[DType::Float32, DType::Float32, DType::Bfloat16, DType::Float16]);
        lab.options.loss_scale.initial = 256.0;
        lab.options.loss_scale.window = 2;
        lab.options.unused = dice.pick(&[Unused::Skip, Unused::Zeros]);
        lab.options.clip = dice.pick(&[0.0, 0.2, 5.0]);
    });
    let description = format!(
        "model of seed {seed}, {:?}, {:?}, clip {}, global batch {}, {rule} {:?}\n  {described}",
        lab.options.dtype,
        lab.options.unused,
        lab.options.clip,
        lab.global,
        lab.optimizer.base().groups
    );
    (lab, description)
}

fn describe(unit: &UnitSpec) -> String {
    let params = unit.params.iter().map(|spec| {
        let frozen = if spec.trainable { "" } else { " frozen" };
        format!("{} {:?}{}{frozen}", spec.name, spec.shape, spec.dtype.map_or(String::new(), |own| format!(" {own:?}")))
    });
    format!("{}{}: {}", unit.name, if unit.root { " (root)" } else { "" }, params.collect::<Vec<_>>().join(", "))
}

/// The drawn model in another layout.
pub(crate) fn scattered(dice: &mut Dice, base: &Lab) -> Lab {
    let ranks = dice.pick(&(1..=4).filter(|n| base.global.is_multiple_of(*n)).collect::<Vec<_>>());
    let zero = zero(dice, ranks);
    let order = dice.roll();
    base.with(|lab| {
        lab.zero = zero;
        lab.ranks = ranks;
        lab.dirty = true;
        if order.is_multiple_of(4) {
            let config = ReorderingConfig { seed: order, window: Duration::from_micros(200) };
            lab.wrap = Some(Arc::new(move |fabric| {
                let config = config.clone();
                wrap(fabric, move |_, inner| Box::new(Reordering::new(inner, &config)))
            }));
        }
    })
}

/// Says which model it was when a check fails, wherever it does.
pub(crate) struct Announce(pub(crate) String);

impl Drop for Announce {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Bit for bit in exact mode, whatever the rule.
fn check_exact(seed: u64) {
    let (base, description) = draw(seed);
    let mut dice = Dice(seed ^ 0xD1CE);
    let _announce = Announce(format!("ZF_TEST_SEED={seed} ZF_TEST_MODELS=1 draws this model again:\n{description}"));
    let (reports, hash) = base.steps(STEPS);
    assert!(reports.iter().any(|report| !report.skipped && report.grad_norm > 0.0), "nothing is trained");
    if is_float32(&base) {
        let (found, plain) = (reports[0].grad_norm, base.dense_norm());
        assert!((found / plain - 1.0).abs() < 1e-4, "norm {found}, plain autograd {plain}");
    }
    for _ in 0..4 {
        let lab = scattered(&mut dice, &base);
        let found = lab.steps(STEPS);
        assert_eq!(bits(&found.0), bits(&reports), "{}", lab.case());
        assert_eq!(found.1, hash, "{}: state", lab.case());
    }
}

fn is_float32(lab: &Lab) -> bool {
    let bfloat16 = |spec: &ParamSpec| spec.dtype.is_some_and(|own| own != DType::Float32);
    lab.options.dtype == DType::Float32 && !lab.model.units().iter().flat_map(|unit| &unit.params).any(bfloat16)
}

/// Within rounding in fast mode. Plain momentum: it does not blow up what is nearly zero, as signs and quotients do.
fn check_fast(seed: u64) {
    let (base, description) = draw(seed);
    let mut dice = Dice(seed ^ 0xFA57);
    let _announce = Announce(format!("ZF_TEST_SEED={seed} ZF_TEST_MODELS=1 draws this model again:\n{description}"));
    let base = base.with(|lab| {
        let groups = lab.optimizer.base().groups.clone();
        let config = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.1, groups };
        lab.optimizer = Arc::new(config.rule().expect("in range"));
    });
    let (start, dense, reports) = (base.masters(0), base.masters(STEPS), base.steps(STEPS).0);
    let moved = distance(&dense, &start);
    // A sum that rounds the other way moves a 16-bit parameter by its last bit, and what is computed from it by as much.
    let tolerance = if is_float32(&base) { 1e-4 } else { 5e-2 };
    for _ in 0..2 {
        let lab = scattered(&mut dice, &base).with(|lab| {
            lab.options.exact = false;
            lab.options.accumulate = dice.pick(&[Accumulate::Float32, Accumulate::Model]);
            lab.options.reduce_when = dice.pick(&[ReduceWhen::Auto, ReduceWhen::MicroBatch, ReduceWhen::Boundary]);
        });
        let case = format!("{:?} {:?} {}", lab.options.accumulate, lab.options.reduce_when, lab.case());
        for (found, expected) in lab.steps(STEPS).0.iter().zip(&reports) {
            assert_eq!((found.skipped, found.tokens), (expected.skipped, expected.tokens), "{case}");
            let apart = (found.loss / expected.loss - 1.0).abs();
            assert!(apart < tolerance, "{case}: losses {} {}", found.loss, expected.loss);
            let apart = (found.grad_norm / expected.grad_norm - 1.0).abs();
            assert!(apart < tolerance, "{case}: norms {} {}", found.grad_norm, expected.grad_norm);
        }
        let apart = distance(&lab.masters(STEPS), &dense);
        assert!(apart < tolerance * moved, "{case}: masters differ by {apart} of {moved}");
    }
}

pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn each(check: impl Fn(u64)) {
    let (first, models) = (number("ZF_TEST_SEED", 1), number("ZF_TEST_MODELS", 20));
    (first..first + models).for_each(check);
    println!("models of seeds {first} to {}", first + models - 1);
}

#[test]
fn any_layout_gives_the_bits_of_one_rank() {
    each(check_exact);
}

#[test]
fn fast_layouts_differ_by_rounding() {
    each(check_fast);
}

/// The drawn models are of every kind that can break a layout.
#[test]
fn the_models_are_of_every_kind() {
    let models: Vec<Lab> = (1..=20).map(|seed| draw(seed).0).collect();
    let units: Vec<UnitSpec> = models.iter().flat_map(|lab| lab.model.units()).collect();
    let any = |what: &str, of: &dyn Fn(&ParamSpec) -> bool| {
        assert!(units.iter().flat_map(|unit| &unit.params).any(of), "no parameter {what}");
    };
    any("without elements", &|spec| spec.numel() == 0);
    any("without dimensions", &|spec| spec.shape.is_empty());
    any("with aliases", &|spec| !spec.aliases.is_empty());
    any("frozen", &|spec| !spec.trainable);
    any("of a type of its own", &|spec| spec.dtype.is_some());
    any("of more than 100 elements", &|spec| spec.numel() > 100);
    assert!(units.iter().any(|unit| unit.params.is_empty()), "no unit without parameters");
    let still = |unit: &UnitSpec| !unit.params.is_empty() && unit.params.iter().all(|spec| !spec.trainable);
    assert!(units.iter().any(still), "no frozen unit");
    assert!(units.iter().any(|unit| unit.root && unit.name.starts_with("block")), "no root but ties");
    let needs = |needs: Needs| assert!(models.iter().any(|lab| lab.optimizer.needs() == needs), "no {needs:?}");
    [Needs::Elements, Needs::TensorSums(2), Needs::Matrices].into_iter().for_each(needs);
    let rules = |lab: &Lab| lab.optimizer.base().groups.clone();
    assert!(models.iter().flat_map(rules).any(|rule| rule.frozen), "no frozen group");
    let empty = |lab: &Lab| {
        let (groups, units) = (rules(lab), lab.model.units());
        let taken = |rule: &GroupRule| {
            let names = units.iter().flat_map(|unit| &unit.params).map(|spec| &spec.name);
            names.into_iter().any(|name| groups.iter().find(|other| other.matches(name)) == Some(rule))
        };
        groups.iter().any(|rule| !taken(rule))
    };
    assert!(models.iter().any(empty), "no empty group");
}
