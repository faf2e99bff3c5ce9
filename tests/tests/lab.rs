//! Engines on a few ranks without a run folder, for tests that look inside a step; and small models of any shape.

use std::sync::Arc;
use std::time::Duration;

use tch::{Device, Kind, Reduction, Tensor};
use zf_comm::{Threads, ThreadsConfig};
use zf_core::bytes::ByteSize;
use zf_core::config::Unused;
use zf_core::data::{BatchPlan, Dataset, Order, OrderKind, Split, assemble};
use zf_core::engine::{Engine, EngineOptions, OffloadStages, Stages, StepReport, run_ranks_on};
use zf_core::layout::DType;
use zf_core::model::{Batch, Context, IGNORE, Init, LossSum, Model, ParamSpec, UnitSpec};
use zf_core::random::RandomWeights;
use zf_core::registry::{Build, BuildContext};
use zf_core::stage::{Fabric, Optimizer, Schedule};
use zf_core::weights::Weights;
use zf_core::{Result, slots};
use zf_model::plain::PlainContext;
use zf_optim::{AdamWConfig, ConstantConfig, SgdConfig};
use zf_partition::ZeroConfig;
use zf_sys::heap::Heap;

/// Everything an engine on each of a few ranks is made of.
#[derive(Clone)]
pub(crate) struct Lab {
    pub(crate) model: Arc<dyn Model>,
    pub(crate) weights: Arc<dyn Weights>,
    pub(crate) dataset: Arc<dyn Dataset>,
    pub(crate) optimizer: Arc<dyn Optimizer>,
    pub(crate) schedule: Arc<dyn Schedule>,
    pub(crate) options: EngineOptions,
    pub(crate) ranks: usize,
    pub(crate) zero: ZeroConfig,
    pub(crate) global: usize,
    pub(crate) micro: usize,
    /// What is around the transport.
    pub(crate) wrap: Option<Wrap>,
    /// Every byte that nobody has written yet reads as NaN, in every type.
    pub(crate) dirty: bool,
    /// What keeps states off the device.
    pub(crate) offload: Option<OffloadStages>,
}

pub(crate) type Wrap = Arc<dyn Fn(Arc<dyn Fabric>) -> Arc<dyn Fabric> + Send + Sync>;

/// The heap of a rank whose fresh memory is NaN.
const DIRTY: u64 = 8 << 20;

/// One rank of a lab.
pub(crate) struct Bench<'a> {
    pub(crate) engine: Engine,
    pub(crate) heap: Heap,
    pub(crate) rank: usize,
    lab: &'a Lab,
    plan: BatchPlan,
}

impl Lab {
    /// A tiny reference model on the reference data, in sequences of 32 tokens, six a step, each a micro-batch.
    pub(crate) fn tiny(name: &str) -> Self {
        let folder = zf_model::folder::HfFolder::open(zf_tests::golden(name)).expect("a golden folder");
        let mut data = zf_model::data::DataConfig::new(zf_tests::golden("tokens.bin"), 32);
        data.order = OrderKind::Sequential;
        let bundle = Build::<slots::Data>::build(data, &BuildContext::default()).expect("golden data");
        let model = folder.model();
        Self::new(model, Arc::new(folder), bundle.dataset)
    }

    /// A model with random weights on made-up sequences of 8 tokens.
    pub(crate) fn of(model: impl Model + 'static) -> Self {
        Self::new(Arc::new(model), Arc::new(RandomWeights { seed: 5 }), Arc::new(Sequences::full()))
    }

    fn new(model: Arc<dyn Model>, weights: Arc<dyn Weights>, dataset: Arc<dyn Dataset>) -> Self {
        let mut options = EngineOptions::new(DType::Float32, 1, 100);
        options.exact = true;
        options.clip = 0.0;
        Self {
            model,
            weights,
            dataset,
            optimizer: adamw(1e-2, 0.1),
            schedule: Arc::new(ConstantConfig::default().schedule().expect("defaults are valid")),
            options,
            ranks: 1,
            zero: ZeroConfig::stage(1),
            global: 6,
            micro: 1,
            wrap: None,
            dirty: false,
            offload: None,
        }
    }

    /// The same on other ranks.
    pub(crate) fn on(&self, ranks: usize, stage: u8) -> Self {
        let zero = ZeroConfig { stage: Some(stage), scope: None, ..self.zero.clone() };
        Self { ranks, zero, ..self.clone() }
    }

    /// The same with buckets of so many bytes.
    pub(crate) fn bucket(&self, bytes: u64) -> Self {
        self.with(|lab| lab.zero.bucket.0 = bytes)
    }

    /// Ranks and partition, for messages.
    pub(crate) fn case(&self) -> String {
        format!("N={} exact={} {:?}", self.ranks, self.options.exact, self.zero)
    }

    /// The same with other options.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut lab = self.clone();
        change(&mut lab);
        lab
    }

    /// The stages with another ZeRO stage.
    pub(crate) fn stages(&self, stage: u8) -> Stages {
        self.on(self.ranks, stage).own_stages()
    }

    /// The stages.
    pub(crate) fn own_stages(&self) -> Stages {
        Stages {
            partitioner: Arc::new(self.zero.partitioner().expect("a stage or scopes")),
            optimizer: self.optimizer.clone(),
            schedule: self.schedule.clone(),
            offload: self.offload.clone(),
        }
    }

    /// Runs `body` on every rank; the results by rank.
    pub(crate) fn run<T: Send>(&self, body: impl Fn(Bench<'_>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let config = ThreadsConfig { ranks: self.ranks, timeout: Duration::from_secs(20), ..ThreadsConfig::default() };
        let mut fabric: Arc<dyn Fabric> = Arc::new(Threads::new(&config)?);
        if let Some(wrap) = &self.wrap {
            fabric = wrap(fabric);
        }
        let plan = BatchPlan::new(self.global, self.micro, self.ranks, self.options.exact)?;
        let mut options = self.options.clone();
        options.accumulation = usize::try_from(plan.accumulation()).expect("small");
        options.micro_batch_tokens = (self.micro * self.dataset.sequence_length()) as u64;
        run_ranks_on(&fabric, 1, self.dirty.then_some(ByteSize(DIRTY)), |rank| {
            if self.dirty {
                fill(&rank.heap)?;
            }
            let stages = self.own_stages();
            let engine = Engine::new(self.model.clone(), stages, options.clone(), rank.transport, &*self.weights)?;
            body(Bench { engine, heap: rank.heap, rank: rank.rank, lab: self, plan })
        })
    }

    /// Takes `steps` steps; what they did and the state's hash, which every rank agrees on.
    ///
    /// # Panics
    /// When a rank fails, or the ranks disagree.
    pub(crate) fn steps(&self, steps: usize) -> (Vec<StepReport>, String) {
        let mut results = self
            .run(|mut bench| {
                let reports = (0..steps).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
                Ok((reports, bench.engine.state_hash()?))
            })
            .unwrap_or_else(|error| panic!("{}: {error}", self.case()));
        let last = results.pop().expect("at least one rank");
        for (rank, (reports, hash)) in results.iter().enumerate() {
            assert_eq!(hash, &last.1, "rank {rank} disagrees on the state");
            assert_eq!(bits(reports), bits(&last.0), "rank {rank} disagrees on what happened");
        }
        last
    }

    /// The masters after `steps` steps, by name.
    pub(crate) fn masters(&self, steps: usize) -> Vec<(String, Vec<f32>)> {
        let all = self.run(|mut bench| {
            for _ in 0..steps {
                bench.step()?;
            }
            bench.masters()
        });
        all.unwrap_or_else(|error| panic!("{}: {error}", self.case())).pop().expect("at least one rank")
    }

    /// The norm of the gradient of the first step, of all trained parameters, by plain autograd: one micro-batch after the
    /// other.
    pub(crate) fn dense_norm(&self) -> f64 {
        let cx = PlainContext::new(&*self.model, &*self.weights, Kind::Float, Device::Cpu).expect("random weights");
        let order = Order::new(self.dataset.len(Split::Train), 1, OrderKind::Sequential);
        let plan = BatchPlan::new(self.global, self.micro, 1, true).expect("divides");
        let mut tokens = 0;
        for turn in plan.turns(0, 0) {
            let batch = assemble(&*self.dataset, &order, Split::Train, &turn, Device::Cpu).expect("made up");
            let loss = self.model.loss(&cx, &batch).expect("runs").sum;
            if loss.requires_grad() {
                loss.backward();
            }
            tokens += batch.target_tokens;
        }
        let groups = &self.optimizer.base().groups;
        let trained = |name: &str| !groups.iter().find(|rule| rule.matches(name)).is_some_and(|rule| rule.frozen);
        let gradients = cx
            .parameters()
            .filter(|(spec, _)| trained(&spec.name))
            .map(|(_, tensor)| tensor.grad())
            .filter(Tensor::defined);
        let squares: f64 = gradients.map(|gradient| gradient.square().sum(Kind::Double).double_value(&[])).sum();
        squares.sqrt() / tokens as f64
    }
}

/// Makes all free memory of a rank's heap read as NaN.
fn fill(heap: &Heap) -> Result<()> {
    let size = heap.room().map_or(0, |room| room.largest_free);
    let fresh = |size, kind| Tensor::f_empty([size], (kind, Device::Cpu));
    drop(fresh(size, Kind::Uint8)?.f_fill_(255)?);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let seen = fresh(size / 64, kind)?.f_isnan()?.f_all()?;
        assert_eq!(seen.f_int64_value(&[])?, 1, "fresh memory read as {kind:?} is a number");
    }
    Ok(())
}

impl Bench<'_> {
    /// The next step.
    pub(crate) fn step(&mut self) -> Result<StepReport> {
        let dataset = &*self.lab.dataset;
        let order = Order::new(dataset.len(Split::Train), 1, OrderKind::Sequential);
        let turns = self.plan.turns(self.engine.steps(), self.rank);
        self.engine.step(&mut |turn| assemble(dataset, &order, Split::Train, &turns[turn], tch::Device::Cpu))
    }

    /// Masters by name, gathered.
    pub(crate) fn masters(&mut self) -> Result<Vec<(String, Vec<f32>)>> {
        let mut all = Vec::new();
        self.engine.for_each_logical(&mut |name, kind, values| {
            if kind == "master" || kind == "parameter" {
                all.push((name.to_string(), values.to_vec()));
            }
            Ok(())
        })?;
        Ok(all)
    }
}

/// What must be equal between ranks and layouts: losses, norms and decisions by bits.
pub(crate) fn bits(reports: &[StepReport]) -> Vec<(u64, u64, u64, bool, u64)> {
    let of = |r: &StepReport| (r.loss.to_bits(), r.grad_norm.to_bits(), r.lr.to_bits(), r.skipped, r.tokens);
    reports.iter().map(of).collect()
}

/// AdamW with rate `lr` and decay `weight_decay`.
pub(crate) fn adamw(lr: f64, weight_decay: f64) -> Arc<dyn Optimizer> {
    let config = AdamWConfig { lr, betas: [0.9, 0.95], eps: 1e-8, weight_decay, groups: Vec::new() };
    Arc::new(config.rule().expect("in range"))
}

/// Plain gradient descent: an update shows the gradient.
pub(crate) fn descent(lr: f64) -> Arc<dyn Optimizer> {
    let config = SgdConfig { lr, momentum: 0.0, weight_decay: 0.0, groups: Vec::new() };
    Arc::new(config.rule().expect("in range"))
}

/// Euclidean length of a difference, and of the subtrahend.
pub(crate) fn distance(a: &[(String, Vec<f32>)], b: &[(String, Vec<f32>)]) -> f64 {
    let names = |of: &[(String, Vec<f32>)]| of.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b), "other parameters");
    let pairs = a.iter().zip(b).flat_map(|((_, a), (_, b))| a.iter().zip(b));
    pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>().sqrt()
}

/// The values of a parameter in a list by name.
pub(crate) fn of<'a>(all: &'a [(String, Vec<f32>)], name: &str) -> &'a [f32] {
    &all.iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no parameter {name}")).1
}

/// Made-up sequences of 8 tokens out of [`VOCABULARY`]; of sequence i the first `counting(i)` targets count.
pub(crate) struct Sequences {
    pub(crate) counting: fn(u64) -> usize,
}

pub(crate) const VOCABULARY: i64 = 11;
pub(crate) const WIDTH: i64 = 6;

impl Sequences {
    /// All targets count.
    pub(crate) fn full() -> Self {
        Self { counting: |_| 8 }
    }
}

impl Dataset for Sequences {
    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 1000 } else { 0 }
    }

    fn sequence_length(&self) -> usize {
        8
    }

    fn read(&self, _split: Split, index: u64, inputs: &mut [i64], targets: &mut [i64]) -> Result<()> {
        let token = |at: u64| ((index * 31 + at * at * 7 + at) % VOCABULARY.unsigned_abs()).cast_signed();
        for (at, (input, target)) in inputs.iter_mut().zip(targets).enumerate() {
            *input = token(at as u64);
            *target = if at < (self.counting)(index) { token(at as u64 + 1) } else { IGNORE };
        }
        Ok(())
    }

    fn identity(&self) -> String {
        "made up".into()
    }
}

type Logits = Box<dyn Fn(&dyn Context, &Batch) -> anyhow::Result<Tensor> + Send + Sync>;

/// A model of any units, with a closure that gives logits `[sequences, length, VOCABULARY]`.
pub(crate) struct Toy {
    pub(crate) units: Vec<UnitSpec>,
    pub(crate) logits: Logits,
}

impl Toy {
    /// Units in order, and the forward pass.
    pub(crate) fn new(
        units: Vec<UnitSpec>,
        logits: impl Fn(&dyn Context, &Batch) -> anyhow::Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Self { units, logits: Box::new(logits) }
    }

    /// Embedding, one residual layer, head.
    pub(crate) fn plain() -> Self {
        Self::new(vec![embedding(), layer("block"), head()], |cx, batch| {
            let x = run_embedding(cx, 0, &batch.inputs)?;
            let x = run_layer(cx, 1, &x)?;
            run_head(cx, 2, &x)
        })
    }
}

impl Model for Toy {
    fn units(&self) -> Vec<UnitSpec> {
        self.units.clone()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let logits = (self.logits)(cx, batch)?.f_to_kind(Kind::Float)?.f_view([-1, VOCABULARY])?;
        let targets = batch.targets.f_view([-1])?;
        let sum = logits.f_cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Sum, IGNORE, 0.0)?;
        Ok(LossSum { sum })
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY.unsigned_abs() as usize
    }
}

/// A unit that is no root.
pub(crate) fn unit(name: &str, params: Vec<ParamSpec>) -> UnitSpec {
    UnitSpec { name: name.into(), params, root: false }
}

/// A trainable parameter with random values.
pub(crate) fn weight(name: &str, shape: &[i64]) -> ParamSpec {
    ParamSpec::new(name, shape, Init::Normal { std: 0.4 })
}

pub(crate) fn embedding() -> UnitSpec {
    unit("embed", vec![weight("embed.weight", &[VOCABULARY, WIDTH])])
}

pub(crate) fn layer(name: &str) -> UnitSpec {
    let (w, b) = (format!("{name}.weight"), format!("{name}.bias"));
    unit(name, vec![weight(&w, &[WIDTH, WIDTH]), weight(&b, &[WIDTH])])
}

pub(crate) fn head() -> UnitSpec {
    unit("head", vec![weight("head.weight", &[VOCABULARY, WIDTH])])
}

pub(crate) fn run_embedding(cx: &dyn Context, index: usize, ids: &Tensor) -> anyhow::Result<Tensor> {
    run(cx, index, ids, |p, ids| Ok(Tensor::f_embedding(p.at(0)?, ids, -1, false, false)?))
}

/// x + tanh(x W^T + b).
pub(crate) fn run_layer(cx: &dyn Context, index: usize, x: &Tensor) -> anyhow::Result<Tensor> {
    run(cx, index, x, |p, x| Ok((x.f_linear(p.at(0)?, Some(p.at(1)?))?.f_tanh()? + x).f_contiguous()?))
}

pub(crate) fn run_head(cx: &dyn Context, index: usize, x: &Tensor) -> anyhow::Result<Tensor> {
    run(cx, index, x, |p, x| Ok(x.f_linear(p.at(0)?, None::<&Tensor>)?))
}

/// Runs a unit of one input and one output.
pub(crate) fn run(
    cx: &dyn Context,
    index: usize,
    x: &Tensor,
    f: impl Fn(&zf_core::model::Params<'_>, &Tensor) -> anyhow::Result<Tensor> + Send + Sync + 'static,
) -> anyhow::Result<Tensor> {
    let outputs = cx.run(index, &[x.shallow_clone()], Arc::new(move |p, x| Ok(vec![f(p, &x[0])?])))?;
    outputs.into_iter().next().ok_or_else(|| anyhow::anyhow!("the unit returned nothing"))
}

/// What a test does to parameters that nothing used.
pub(crate) fn unused(lab: &Lab, unused: Unused) -> Lab {
    lab.with(|lab| lab.options.unused = unused)
}
